// SPDX-License-Identifier: Apache-2.0
// Every function of cpu/simd/ on one instruction set against plain C++. Prints the functions that it checks, and what
// fails. Started by tests/cpp/test_simd.py, which says the instruction set and compares the list with the headers.
#include LOWBIT_ISA_HEADER

#include "cpu/simd/double.hpp"
#include "cpu/simd/math.hpp"

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "lanes.hpp"
#include "loads_and_stores.hpp"
#include "math.hpp"
#include "products.hpp"
#ifdef LOWBIT_HAS_TILES
#include "tiles.hpp"
#endif

int main() {
  check_floats(), check_integers(), check_reductions(), check_doubles();
  check_loads(), check_pairs_and_halves(), check_stores(), check_lookups(), check_tails();
  check_codes(), check_dots(), check_semi_sparse_dot();
  check_math();
#ifdef LOWBIT_HAS_TILES
#ifdef SYS_arch_prctl
  syscall(SYS_arch_prctl, 0x1023, 18);  // Linux lets a program use AMX after it has asked, as core/isa.cpp does
#endif
  check_tiles();
#endif
  std::printf("%d failed\n", report.failed);
  return report.failed != 0;
}
