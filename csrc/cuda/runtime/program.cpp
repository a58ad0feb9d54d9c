// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/program.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/once.hpp"
#include "cuda/runtime/cubin_cache.hpp"
#include "cuda/runtime/nvrtc.hpp"

namespace lowbit::cuda {
namespace {

bool is_on(const char* variable, bool otherwise) {
  const char* value = std::getenv(variable);
  return value && *value ? std::strcmp(value, "0") != 0 : otherwise;
}

// Compiles, and prints one line on stderr, since it may take seconds without any other output.
Compiled compile_into(const std::string& path, const Source& source, const std::string& arch) {
  const auto started = std::chrono::steady_clock::now();
  Compiled made = compile(source.name, source.text, arch);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  const std::string lost = write_cached(path, made.image);
  const std::string known = made.target == arch ? "" : concat(" (as ", made.target, ", the nearest that NVRTC knows)");
  std::fprintf(stderr, "lowbit: compiled %s for %s%s in %.2f s, %s %s\n", source.name.c_str(), arch.c_str(),
               known.c_str(), seconds, lost.empty() ? "kept in" : "not kept:",
               lost.empty() ? path.c_str() : lost.c_str());
  return made;
}

Module load(const Place& place, const Source& source) {
  const std::string where = name_of(place.device), arch = architecture(place.device);
  check(!is_captured(place), ErrorKind::runtime, where, ": ", source.name,
        " is not loaded yet, which a stream cannot do while it is captured in a CUDA graph: call the same once before "
        "(lowbit.warmup)");
  const std::string path = cached_path(source.text, arch);
  Module module = nullptr;
  for (const auto& image : {read_packed(path), read_cached(path)})  // compiled again if it does not load
    if (image && driver().load_module(&module, image->data(), nullptr, nullptr, 0, nullptr, nullptr, 0) == 0)
      return module;
  check(is_on("LOWBIT_JIT", true), ErrorKind::runtime, where, ": there is no code of ", source.name, " for ", arch,
        " (", path, "), and LOWBIT_JIT=0 forbids to compile it; `python -m lowbit prebuild --arch ", arch,
        "` makes it");
  const Compiled made = compile_into(path, source, arch);
  int version = 0;
  driver().version(&version);
  ensure(driver().load_module(&module, made.image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
         concat(where, ": loading ", source.name, " for ", arch, ", which NVRTC ", compiler().version, " (",
                compiler().path, ") made, by a driver of CUDA ", version_text(version)));
  return module;
}

// The programs of this process, by device index and key.
struct Programs {
  mutable std::mutex mutex;
  mutable std::map<std::pair<int16_t, SourceKey>, Program> loaded;  // nodes never move
};

}  // namespace

Function Program::function(const char* kernel, int shared_bytes) const {
  const std::lock_guard lock(mutex_);
  if (const auto found = functions_.find(kernel); found != functions_.end()) return found->second;
  KernelHandle handle = nullptr;
  Function function = nullptr;
  ensure(driver().get_kernel(&handle, module_, kernel), concat(name_, ": finding ", kernel));
  ensure(driver().get_function(&function, handle), concat(name_, ": the function of ", kernel));
  if (shared_bytes > 48 << 10)  // each function may have that much anyway
    ensure(driver().set_attribute(function, kMaxSharedBytes, shared_bytes),
           concat(name_, ": ", shared_bytes, " bytes of shared memory for ", kernel));
  return functions_.emplace(kernel, function).first->second;
}

void Program::launch(const Place& place, const char* kernel, int64_t ctas, int threads, const void* args,
                     int shared_bytes) const {
  launch(place, kernel, ctas, threads, args, shared_bytes, false);
}

void Program::launch_early(const Place& place, const char* kernel, int64_t ctas, int threads, const void* args,
                           int shared_bytes) const {
  static std::atomic<const bool*> wanted{nullptr};
  const bool early = made_once(wanted, [] { return is_on("LOWBIT_EARLY", true); }) && can_begin_early(place.device);
  launch(place, kernel, ctas, threads, args, shared_bytes, early);
}

void Program::launch(const Place& place, const char* kernel, int64_t ctas, int threads, const void* args,
                     int shared_bytes, bool early) const {
  const Function wanted = function(kernel, shared_bytes);
  void* arguments[] = {const_cast<void*>(args)};
  const auto what = [&] {
    return concat(name_of(place.device), ": ", kernel, " of ", name_, ", ", ctas, " CTAs of ", threads, " threads");
  };
  const Launch launch{.grid = {static_cast<unsigned>(ctas), 1, 1}, .block = {static_cast<unsigned>(threads), 1, 1},
                      .shared_bytes = static_cast<unsigned>(shared_bytes), .stream = place.stream,
                      .attributes = early ? &kBeginsEarly : nullptr, .count = early};
  const Result failed = driver().launch(&launch, wanted, arguments, nullptr);
  if (failed) ensure(failed, what());
  static std::atomic<const bool*> waits{nullptr};
  if (made_once(waits, [] { return is_on("LOWBIT_SYNC", false); }) && !is_captured(place))
    ensure(driver().synchronize(place.stream), what());
}

const Program& program(const Place& place, const SourceKey& key, const std::function<Source()>& source) {
  static std::atomic<const Programs*> kept{nullptr};
  const Programs& programs = made_once(kept, [] { return Programs(); });
  const std::lock_guard lock(programs.mutex);
  const std::pair wanted(place.device.index, key);
  const auto found = programs.loaded.find(wanted);
  if (found != programs.loaded.end()) return found->second;
  const Source made = source();
  return programs.loaded.try_emplace(wanted, made.name, load(place, made)).first->second;
}

Prebuilt prebuild(const Source& source, const std::string& arch) {
  const std::string path = cached_path(source.text, arch);
  return {.path = path, .log = compile_into(path, source, arch).log};
}

}  // namespace lowbit::cuda
