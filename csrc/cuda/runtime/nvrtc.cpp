// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/nvrtc.hpp"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "core/once.hpp"
#include "cuda/runtime/libraries.hpp"

namespace lowbit::cuda {
namespace {

using Handle = struct ProgramOfNvrtc*;

#define LOWBIT_NVRTC(X)                                                                                     \
  X(version, "nvrtcVersion", int* major, int* minor)                                                        \
  X(create, "nvrtcCreateProgram", Handle* program, const char* source, const char* name, int headers,       \
    const char* const* texts, const char* const* names)                                                     \
  X(compile, "nvrtcCompileProgram", Handle program, int count, const char* const* options)                  \
  X(destroy, "nvrtcDestroyProgram", Handle* program)                                                        \
  X(log_size, "nvrtcGetProgramLogSize", Handle program, std::size_t* bytes)                                 \
  X(log, "nvrtcGetProgramLog", Handle program, char* text)                                                  \
  X(cubin_size, "nvrtcGetCUBINSize", Handle program, std::size_t* bytes)                                    \
  X(cubin, "nvrtcGetCUBIN", Handle program, char* image)                                                    \
  X(ptx_size, "nvrtcGetPTXSize", Handle program, std::size_t* bytes)                                        \
  X(ptx, "nvrtcGetPTX", Handle program, char* image)                                                        \
  X(count_known, "nvrtcGetNumSupportedArchs", int* count)                                                   \
  X(known, "nvrtcGetSupportedArchs", int* architectures)

struct Nvrtc { LOWBIT_NVRTC(LOWBIT_FUNCTION_MEMBER) };

const Nvrtc& nvrtc() {
  static std::atomic<const Nvrtc*> kept{nullptr};
  return made_once(kept, [] {
    const Library& found = library(LibraryName::nvrtc);
    return Nvrtc{LOWBIT_NVRTC(LOWBIT_FUNCTION_FOUND)};
  });
}

using Getter = int (*)(Handle, char*);
using SizeGetter = int (*)(Handle, std::size_t*);

std::string text_of(Handle program, SizeGetter size, Getter get) {
  std::size_t bytes = 0;
  if (size(program, &bytes) != 0) return "";
  std::string text(bytes, '\0');
  return get(program, text.data()) == 0 ? text : "";
}

// The target of a compilation: machine code, or, for an architecture unknown to NVRTC, PTX of the newest earlier one
// that NVRTC knows. The driver compiles PTX when it loads it. NVRTC 12.8 knows 100, 101 and 120, and not 103.
struct Target {
  std::string architecture;
  bool is_ptx;
};

Target target_of(const std::string& architecture) {
  int count = 0;
  nvrtc().count_known(&count);
  std::vector<int> known(static_cast<std::size_t>(count));
  if (count > 0) nvrtc().known(known.data());
  const int wanted = architecture.starts_with("sm_") ? std::atoi(architecture.c_str() + 3) : 0;
  int nearest = 0;
  for (const int other : known)
    if (other <= wanted) nearest = std::max(nearest, other);
  if (nearest == wanted || nearest == 0) return {architecture, false};
  return {concat("compute_", nearest), true};
}

// An fma only where the source has one, so that devices give the bits of the CPU's rows.
constexpr const char* kOptions[] = {"-std=c++20", "-default-device", "-fmad=false", "--ptxas-options=-v"};

}  // namespace

std::string compile_options() {
  std::string all;
  for (const char* option : kOptions) all += concat(option, " ");
  return all;
}

const Compiler& compiler() {
  static std::atomic<const Compiler*> kept{nullptr};
  return made_once(kept, [] {
    const Library& found = library(LibraryName::nvrtc);
    if (!found.handle) return Compiler{};
    int major = 0, minor = 0;
    nvrtc().version(&major, &minor);
    return Compiler{.version = concat(major, ".", minor), .path = found.path, .number = 1000 * major + 10 * minor};
  });
}

Compiled compile(const std::string& name, const std::string& source, const std::string& architecture) {
  std::vector<const char*> texts, names;
  for (const DeviceHeader& header : device_headers()) texts.push_back(header.text), names.push_back(header.name);
  const std::string text = "#include \"cuda/device/prelude.cuh\"\n" + source;
  check(compiler().number == 0 || compiler().number >= kOldestNvrtc, ErrorKind::runtime, name, ": NVRTC is ",
        compiler().version, " (", compiler().path, "), wanted ", version_text(kOldestNvrtc), " or later");
  Handle program = nullptr;
  const int created = nvrtc().create(&program, text.c_str(), name.c_str(), static_cast<int>(names.size()),
                                     texts.data(), names.data());
  check(created == 0, ErrorKind::runtime, name, ": nvrtcCreateProgram failed: ", created);
  const auto [target, is_ptx] = target_of(architecture);
  const std::string option = "--gpu-architecture=" + target;
  std::vector<const char*> options{option.c_str()};
  options.insert(options.end(), std::begin(kOptions), std::end(kOptions));
  const int failed = nvrtc().compile(program, static_cast<int>(options.size()), options.data());
  Compiled made{.image = failed   ? ""
                         : is_ptx ? text_of(program, nvrtc().ptx_size, nvrtc().ptx)
                                  : text_of(program, nvrtc().cubin_size, nvrtc().cubin),
                .log = text_of(program, nvrtc().log_size, nvrtc().log),
                .target = target};
  nvrtc().destroy(&program);
  check(!made.image.empty(), ErrorKind::runtime, name, ": NVRTC ", compiler().version, " (", compiler().path,
        ") made no code for ", architecture, ", error ", failed, "\n", made.log);
  return made;
}

}  // namespace lowbit::cuda
