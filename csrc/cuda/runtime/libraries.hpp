// SPDX-License-Identifier: Apache-2.0
// NVIDIA's libraries, opened on first use: nothing of CUDA is linked.
#pragma once

#include "core/library.hpp"

namespace lowbit::cuda {

// The file names of each library (newest first), and its pip package. `python -m lowbit info` lists the libraries of
// this table.
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

// Opened by the first call, from the first of: the folders of LOWBIT_CUDA_PATH; libraries already loaded (torch loads
// most of them); nvidia/*/lib in the folders of look_in(); CUDA_HOME; the system's folders.
LOWBIT_API const Library& library(LibraryName name);

// "12.8" for 12080, CUDA's encoding.
inline std::string version_text(int number) { return concat(number / 1000, ".", number % 1000 / 10); }

}  // namespace lowbit::cuda
