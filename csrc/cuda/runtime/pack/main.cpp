// SPDX-License-Identifier: Apache-2.0
// lowbit_pack FOLDER ARCHITECTURE...: compiles the most common kernels into FOLDER/cuda, as a part of the build.
#include <cstdio>
#include <cstdlib>

#include "cuda/sources.hpp"

int main(int count, char** arguments) try {
  if (count < 3) return std::fputs("lowbit_pack FOLDER ARCHITECTURE...\n", stderr), 2;
  setenv("LOWBIT_CACHE_DIR", arguments[1], 1);
  for (int i = 2; i < count; i++)
    for (const lowbit::cuda::Source& source : lowbit::cuda::common_sources(arguments[i]))
      lowbit::cuda::prebuild(source, arguments[i]);
  return 0;
} catch (const std::exception& error) {
  return std::fprintf(stderr, "lowbit_pack: %s\n", error.what()), 1;
}
