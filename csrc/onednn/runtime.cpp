// SPDX-License-Identifier: Apache-2.0
#include "onednn/runtime.hpp"

#include "core/fork.hpp"
#include "core/once.hpp"
#include "core/os.hpp"
#include "core/parallel.hpp"

namespace lowbit::onednn {
namespace {

// pip installs libdnnl.so.3 of onednn-cpu-gomp in <prefix>/lib; site-packages is lib/python3.x/site-packages.
std::vector<std::string> folders_of_packages() {
  std::vector<std::string> folders;
  for (const std::string& site : site_packages())
    if (site.ends_with("-packages")) folders.push_back(site + "/../..");
  return folders;
}

const Library& library() {
  static std::atomic<const Library*> kept{nullptr};
  return made_once(kept, [] {
    std::vector<std::string> own = folders_of("LOWBIT_ONEDNN_PATH", "");
    for (const char* below : {"/lib", "/lib64"})
      for (std::string& folder : folders_of("ONEDNN_ROOT", below)) own.push_back(std::move(folder));
    return open_library({.names = "libdnnl.so.3", .source = "pip install onednn-cpu-gomp", .own = std::move(own),
                         .packages = folders_of_packages(), .home = {}});
  });
}

std::string_view name_of_runtime(unsigned runtime) {
  switch (runtime) {
    case 0: return "not for CPUs";
    case kSequential: return "no threads";
    case kOpenMP: return "OpenMP";
    case kTbb: return "TBB";
    case kThreadPool: return "a thread pool that the caller brings";
    case kSycl: return "SYCL";
    default: return "a runtime that lowbit does not know";
  }
}

std::string path_of_symbol(void* symbol) {
  const std::string path = os::file_of(symbol);
  return path.empty() ? "an unknown library" : path;
}

// A second OpenMP would have its own threads, which wait (and spin) on the cores where torch's work.
OpenMP shared_openmp(const Library& found) {
  void* const its = found.symbol("omp_set_num_threads");
  void* const torch = os::loaded_library(os::name_of_library("torch_cpu").c_str());
  void* const of_torch = torch ? os::find_symbol(torch, "omp_set_num_threads") : its;
  check(!of_torch || its == of_torch, ErrorKind::runtime, found.path, " runs on the OpenMP of ", path_of_symbol(its),
        ", and torch on that of ", path_of_symbol(of_torch), ": their threads would fight for the cores");
  return {.set_num_threads = reinterpret_cast<void (*)(int)>(its),
          .get_max_threads = reinterpret_cast<int (*)()>(found.symbol("omp_get_max_threads")),
          .in_parallel = reinterpret_cast<int (*)()>(found.symbol("omp_in_parallel"))};
}

std::string version_text(const Version& version) {
  return concat(version.major, ".", version.minor, ".", version.patch, ", ", name_of_runtime(version.cpu_runtime));
}

const Version& version_of(const Library& found) {
  const auto version = reinterpret_cast<const Version* (*)()>(found.symbol("dnnl_version"))();
  check(version != nullptr, ErrorKind::runtime, found.path, ": dnnl_version says nothing");
  return *version;
}

Api open_api() {
  const Library& found = library();
  const Version& version = version_of(found);
  check(version.major == 3, ErrorKind::runtime, found.path, " is oneDNN ", version_text(version), ", wanted 3.x");
  return {LOWBIT_ONEDNN_FUNCTIONS(LOWBIT_FUNCTION_FOUND)
          .desc_bytes = reinterpret_cast<decltype(Api::desc_bytes)>(found.symbol("dnnl_memory_desc_get_size"))};
}

Runtime open() {
  const Api& of = api();
  const Library& found = library();
  const Version& version = version_of(found);
  check(version.cpu_runtime == kOpenMP || version.cpu_runtime == kSequential, ErrorKind::runtime, found.path,
        " is oneDNN ", version_text(version), ": its threads are not torch's, wanted a build with OpenMP "
        "(pip install onednn-cpu-gomp)");
  Runtime made{.engine = nullptr,
               .openmp = version.cpu_runtime == kOpenMP ? shared_openmp(found) : OpenMP{}};
  ensure(of.engine_create(&made.engine, kCpu, 0), "dnnl_engine_create");
  return made;
}

Facts find_out() {
  const Library& found = library();
  Facts facts{.path = found.path, .version = {}, .reason = {}};
  try {
    facts.version = version_text(version_of(found));
    runtime();
  } catch (const Error& error) {
    facts.reason = error.what();
  }
  return facts;
}

}  // namespace

const Api& api() {
  static std::atomic<const Api*> kept{nullptr};
  return made_once(kept, open_api);
}

const Runtime& runtime() {
  static std::atomic<const Runtime*> kept{nullptr};
  return made_once(kept, open);
}

const Facts& facts() {
  static std::atomic<const Facts*> kept{nullptr};
  return made_once(kept, find_out);
}

const std::string& unavailable(Device) { return facts().reason; }

void ensure(int status, std::string_view function) {
  check(status == 0, ErrorKind::runtime, "oneDNN: ", function, " failed: ",
        status == kOutOfMemory ? "out of memory" : "status ", status == kOutOfMemory ? "" : std::to_string(status));
}

Threads::Threads() {
  const OpenMP& openmp = runtime().openmp;
  if (!openmp.set_num_threads) return;
  before_ = openmp.get_max_threads();
  count_ = was_forked() || openmp.in_parallel() ? 1 : num_threads();
  if (count_ != before_) openmp.set_num_threads(count_);
}

Threads::~Threads() {
  const OpenMP& openmp = runtime().openmp;
  if (openmp.set_num_threads && count_ != before_) openmp.set_num_threads(before_);
}

}  // namespace lowbit::onednn
