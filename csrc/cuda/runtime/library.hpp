// SPDX-License-Identifier: Apache-2.0
// NVIDIA's libraries, opened when first needed: nothing of CUDA is linked, and a machine without it never looks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace lowbit::cuda {

// What each is called (the newest first), and where pip has it. A line here is a library of `python -m lowbit info`.
#define LOWBIT_CUDA_LIBRARIES(X)                                                   \
  X(driver, "libcuda.so.1", "NVIDIA's driver")                                     \
  X(nvrtc, "libnvrtc.so.13 libnvrtc.so.12", "pip install nvidia-cuda-nvrtc")       \
  X(cublas_lt, "libcublasLt.so.13 libcublasLt.so.12", "pip install nvidia-cublas") \
  X(cudnn, "libcudnn.so.9", "pip install nvidia-cudnn-cu13")                       \
  X(cusparse_lt, "libcusparseLt.so.0", "pip install nvidia-cusparselt-cu13")

#define LOWBIT_CUDA_LIBRARY(name, sonames, source) name,
enum class LibraryName { LOWBIT_CUDA_LIBRARIES(LOWBIT_CUDA_LIBRARY) };
#undef LOWBIT_CUDA_LIBRARY
#define LOWBIT_CUDA_LIBRARY(name, sonames, source) #name,
inline constexpr std::string_view kLibraryNames[] = {LOWBIT_CUDA_LIBRARIES(LOWBIT_CUDA_LIBRARY)};
#undef LOWBIT_CUDA_LIBRARY

struct Library {
  void* handle = nullptr;
  std::string path = {};     // of the file, once open
  std::string missing = {};  // where it was looked for, and what installs it

  // The address of a function, or an Error that names it.
  void* symbol(const char* name) const;
};

// Opened at the first call, in this order: a folder of LOWBIT_CUDA_PATH; what the process has loaded (torch brings most
// of it); nvidia/*/lib in the folders of look_in(); CUDA_HOME; wherever the system looks.
LOWBIT_API const Library& library(LibraryName name);

// For a list of functions, X(name, symbol, parameters ...): members of a struct that points to them, and its
// initialisers from the library `found`. All return 0 for success.
#define LOWBIT_FUNCTION_MEMBER(name, symbol_name, ...) int (*name)(__VA_ARGS__);
#define LOWBIT_FUNCTION_FOUND(name, symbol_name, ...) \
  .name = reinterpret_cast<int (*)(__VA_ARGS__)>(found.symbol(symbol_name)),

// Folders of Python packages; before the first library().
LOWBIT_API void look_in(std::vector<std::string> site_packages);

}  // namespace lowbit::cuda
