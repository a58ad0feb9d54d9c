// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1 and libnvrtc.so.13 of a machine without a GPU: NVRTC is g++ with cuda_on_host.hpp, a cubin is a shared
// object, a launch runs it on the host before it returns. Found by LOWBIT_CUDA_PATH, where kernels/ keeps what g++
// made, by the text of the source and of the headers that it includes. The environment says what goes wrong, in each
// call anew:
//   LOWBIT_EMULATED_FAIL=<function>:<CUresult>   that function fails
//   LOWBIT_EMULATED_CAPTURING=1                  streams are being captured
//   LOWBIT_EMULATED_LOG=<file>                   one line for each launch, load and context
//   LOWBIT_EMULATED_SEED=<number>                in which order threads run
//   LOWBIT_EMULATED_WITHOUT_WAIT=<number>        this barrier, or wait for copies, of the device sources is taken out
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kNotFound = 500, kLaunchFailed = 719, kInvalidContext = 201;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int failure(const char* function) {
  const std::string fail = environment("LOWBIT_EMULATED_FAIL"), wanted = std::string(function) + ":";
  return fail.starts_with(wanted) ? std::stoi(fail.substr(wanted.size())) : kSuccess;
}

template <class... Parts>
void log(const Parts&... parts) {
  const std::string path = environment("LOWBIT_EMULATED_LOG");
  if (path.empty()) return;
  std::ofstream file(path, std::ios::app);
  (file << ... << parts) << "\n";
}

struct Program {
  std::string source, log, image;
  std::vector<std::string> names, texts;
  bool is_ptx = false;
};

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

// The barriers and waits for copies of all headers in one numbering, from 0.
void take_out_wait(std::string& text, int& number) {
  static const std::regex wait(
      R"((__sync(?:threads|warp)\(|wait_for_(?:copies|kernels_before|(?:groups|products)<[^>]*>)\()"
      R"(|wait_for\([^;]*)\);)");
  for (std::sregex_iterator i(text.begin(), text.end(), wait), end; i != end; ++i)
    if (number-- == 0) {
      text.replace(static_cast<std::size_t>(i->position()), i->str().size(), i->str().size(), ' ');
      return;
    }
}

// The source and what it includes, directly or not: two programs of the same text are the same.
void add_included(const Program& program, const std::string& text, std::set<std::string>& seen, std::string& all) {
  all += text;
  for (std::size_t at = 0; (at = text.find("#include \"", at)) != std::string::npos;) {
    at += 10;
    const std::string name = text.substr(at, text.find('"', at) - at);
    for (std::size_t i = 0; i < program.names.size(); i++)
      if (program.names[i] == name && seen.insert(name).second) add_included(program, program.texts[i], seen, all);
  }
}

fs::path kept_image(const Program& program) {
  std::string all;
  std::set<std::string> seen;
  add_included(program, program.source, seen, all);
  char name[64];
  const std::hash<std::string> hash;
  const std::string other = program.source + std::to_string(all.size()) + all;
  std::snprintf(name, sizeof name, "%016zx%016zx.so", hash(all), hash(other));
  return fs::path(environment("LOWBIT_CUDA_PATH")) / "kernels" / name;
}

struct Loaded {
  void* library;
  bool (*run)(void (*)(const void*), const void*, unsigned, unsigned, unsigned, unsigned, bool);
};
struct Kernel {
  const Loaded* loaded;
  std::string name;
  void (*body)(const void*);
};

thread_local std::vector<void*> contexts;  // of this thread: none at first, as in a thread of autograd's

int text_out(const std::string& text, char* to) { return std::memcpy(to, text.data(), text.size()), kSuccess; }

}  // namespace

#define EMULATED extern "C" __attribute__((visibility("default"))) int
#define FAILS_AS_TOLD(function) \
  if (const int failed = failure(function)) return failed

extern "C" __attribute__((visibility("default"))) const int lowbit_emulates_cuda = 1;

EMULATED cuInit(unsigned) { FAILS_AS_TOLD("cuInit"); return kSuccess; }
EMULATED cuDriverGetVersion(int* version) {
  const std::string told = environment("LOWBIT_EMULATED_VERSION");
  *version = told.empty() ? 13000 : std::stoi(told);
  return kSuccess;
}
EMULATED cuDeviceGetCount(int* count) { return *count = 8, kSuccess; }
EMULATED cuDeviceGet(int* device, int index) { return *device = index, kSuccess; }
EMULATED cuDeviceGetAttribute(int* value, int attribute, int device) {
  const std::string told = environment("LOWBIT_EMULATED_CAPABILITY");  // "90"
  const int capability = told.empty() ? 90 : std::stoi(told);
  // Device 0 is as wide as an H100, the others are small, as most tests are.
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : device == 0 ? 132 : 2;
  return kSuccess;
}
EMULATED cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1), kSuccess;
}
EMULATED cuCtxGetCurrent(void** context) {
  return *context = contexts.empty() ? nullptr : contexts.back(), kSuccess;
}
EMULATED cuCtxPushCurrent_v2(void* context) {
  return contexts.push_back(context), log("push ", reinterpret_cast<intptr_t>(context) - 1), kSuccess;
}
EMULATED cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kInvalidContext;
  return *context = contexts.back(), contexts.pop_back(), log("pop"), kSuccess;
}
EMULATED cuGetErrorName(int error, const char** name) {
  *name = error == kLaunchFailed ? "CUDA_ERROR_LAUNCH_FAILED" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == 46 ? "CUDA_ERROR_DEVICE_UNAVAILABLE" : "CUDA_ERROR";
  return kSuccess;
}
EMULATED cuGetErrorString(int, const char** text) { return *text = "as the emulation was told", kSuccess; }
EMULATED cuStreamIsCapturing(void*, int* status) {
  if (contexts.empty()) return kInvalidContext;
  return *status = environment("LOWBIT_EMULATED_CAPTURING") == "1", kSuccess;
}
EMULATED cuMemcpyDtoHAsync_v2(void* to, const void* from, std::size_t bytes, void*) {
  FAILS_AS_TOLD("cuMemcpyDtoHAsync_v2");
  return log("read ", bytes), std::memcpy(to, from, bytes), kSuccess;
}
EMULATED cuStreamSynchronize(void*) { FAILS_AS_TOLD("cuStreamSynchronize"); return log("synchronize"), kSuccess; }

// The image ends where its ELF header says: the section headers are the last of it.
EMULATED cuLibraryLoadData(void** module, const void* image, void*, void**, unsigned, void*, void**, unsigned) {
  FAILS_AS_TOLD("cuLibraryLoadData");
  const auto* bytes = static_cast<const unsigned char*>(image);
  if (std::memcmp(bytes, "\177ELF", 4) != 0) return kInvalidValue;
  uint64_t sections = 0;
  uint16_t size = 0, count = 0;
  std::memcpy(&sections, bytes + 0x28, 8), std::memcpy(&size, bytes + 0x3a, 2), std::memcpy(&count, bytes + 0x3c, 2);
  const std::size_t length = sections + std::size_t{size} * count;
  const int file = memfd_create("kernels", 0);
  if (::write(file, image, length) != static_cast<ssize_t>(length)) return kInvalidValue;
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), kInvalidValue;
  *module = new Loaded{library, reinterpret_cast<decltype(Loaded::run)>(dlsym(library, "lowbit_run_grid"))};
  return log("load ", length), kSuccess;
}
EMULATED cuLibraryGetKernel(void** kernel, void* module, const char* name) {
  const auto* loaded = static_cast<const Loaded*>(module);
  auto* body = reinterpret_cast<void (*)(const void*)>(dlsym(loaded->library, name));
  return body ? (*kernel = new Kernel{loaded, name, body}, kSuccess) : kNotFound;
}
EMULATED cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, kSuccess; }
EMULATED cuFuncSetAttribute(void* function, int attribute, int value) {
  constexpr int kMaxOnAda = 99 << 10, kMaxOnHopper = 227 << 10;  // the least of all architectures
  const bool of_hopper = static_cast<const Kernel*>(function)->name.find("wgmma") != std::string::npos;
  return attribute == 8 && value <= (of_hopper ? kMaxOnHopper : kMaxOnAda) ? kSuccess : kInvalidValue;
}
struct Attribute {  // CUlaunchAttribute
  int id;
  alignas(8) int value[16];
};
struct Launch {  // CUlaunchConfig
  unsigned x, y, z, threads, threads_y, threads_z, shared_bytes;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};
EMULATED cuLaunchKernelEx(const Launch* launch, void* function, void** arguments, void**) {
  const auto* kernel = static_cast<const Kernel*>(function);
  constexpr int kProgrammaticStreamSerialization = 6;
  const bool early = launch->count == 1 && launch->attributes->id == kProgrammaticStreamSerialization &&
                     launch->attributes->value[0] == 1;
  log("launch ", kernel->name, " ", launch->x, " ", launch->threads, " ", reinterpret_cast<intptr_t>(launch->stream),
      early ? " early" : "");
  FAILS_AS_TOLD("cuLaunchKernelEx");
  if (launch->x == 0 || launch->y != 1 || launch->z != 1 || launch->count != early) return kInvalidValue;
  const std::string seed = environment("LOWBIT_EMULATED_SEED");
  const bool ran = kernel->loaded->run(kernel->body, arguments[0], launch->x, launch->threads, launch->shared_bytes,
                                       seed.empty() ? 0 : std::stoul(seed), early);
  return ran ? kSuccess : kLaunchFailed;
}

EMULATED nvrtcVersion(int* major, int* minor) {
  const std::string told = environment("LOWBIT_EMULATED_NVRTC");  // "12.1"
  return std::sscanf(told.empty() ? "13.0" : told.c_str(), "%d.%d", major, minor), kSuccess;
}
EMULATED nvrtcGetNumSupportedArchs(int* count) { return *count = 3, kSuccess; }
EMULATED nvrtcGetSupportedArchs(int* known) { return known[0] = 80, known[1] = 120, known[2] = 90, kSuccess; }
EMULATED nvrtcCreateProgram(void** program, const char* source, const char*, int headers, const char* const* texts,
                            const char* const* names) {
  auto* made = new Program;
  made->source = source;
  made->names.assign(names, names + headers), made->texts.assign(texts, texts + headers);
  for (const std::string& name : made->names) log("header ", name);
  return *program = made, kSuccess;
}
EMULATED nvrtcCompileProgram(void* handle, int count, const char* const* options) {
  FAILS_AS_TOLD("nvrtcCompileProgram");
  auto* program = static_cast<Program*>(handle);
  for (int i = 0; i < count; i++)
    if (std::strstr(options[i], "--gpu-architecture=compute_")) program->is_ptx = true;
  const fs::path folder = fs::path(environment("LOWBIT_CUDA_PATH")) / ("build-" + std::to_string(getpid()));
  const std::string without = environment("LOWBIT_EMULATED_WITHOUT_WAIT");
  if (int wait = without.empty() ? -1 : std::stoi(without); wait >= 0)
    for (std::string& text : program->texts) take_out_wait(text, wait);
  const fs::path kept = kept_image(*program);
  if (fs::exists(kept)) return program->image = read(kept), kSuccess;
  for (std::size_t i = 0; i < program->names.size(); i++)
    write(folder / program->names[i],  // the others are the C++ library, which std_on_host.hpp has
          program->names[i].find('/') != std::string::npos ? program->texts[i] : "");
  write(folder / "kernels.cpp", program->source);
  const std::string at = folder.string();
  const std::string made = environment("LOWBIT_CUDA_PATH");
  const std::string command = LOWBIT_KERNEL_COMPILER " -include " + made + "/cuda_on_host.hpp -I" + at + " " + at +
                              "/kernels.cpp " + made + "/*.o " + made + "/libcuda.so.1 -o " + at + "/kernels.so > " + at + "/log 2>&1";
  const int failed = std::system(command.c_str());
  program->log = read(folder / "log"), program->image = failed ? "" : read(folder / "kernels.so");
  if (!failed) fs::rename(folder / "kernels.so", kept);
  fs::remove_all(folder);
  return failed ? 6 : kSuccess;
}
EMULATED nvrtcDestroyProgram(void** program) { return delete static_cast<Program*>(*program), kSuccess; }
EMULATED nvrtcGetProgramLogSize(void* program, std::size_t* bytes) {
  return *bytes = static_cast<Program*>(program)->log.size(), kSuccess;
}
EMULATED nvrtcGetProgramLog(void* program, char* text) { return text_out(static_cast<Program*>(program)->log, text); }
EMULATED nvrtcGetCUBINSize(void* program, std::size_t* bytes) {
  const auto* made = static_cast<Program*>(program);
  return *bytes = made->is_ptx ? 0 : made->image.size(), kSuccess;
}
EMULATED nvrtcGetCUBIN(void* program, char* image) { return text_out(static_cast<Program*>(program)->image, image); }
EMULATED nvrtcGetPTXSize(void* program, std::size_t* bytes) {
  return *bytes = static_cast<Program*>(program)->image.size(), kSuccess;
}
EMULATED nvrtcGetPTX(void* program, char* image) { return text_out(static_cast<Program*>(program)->image, image); }
