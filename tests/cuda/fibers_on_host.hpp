// SPDX-License-Identifier: Apache-2.0
// The threads of the emulation, as its instructions see them; kernels include cuda_on_host.hpp alone.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <random>
#include <vector>

#include "cuda_on_host.hpp"

namespace on_host {

constexpr std::size_t kStack = 64 << 10;

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  State state = State::runs;
  bool begun = false;
  int collectives = 0;
  // Of this collective operation and the one before, which another thread may not have read yet.
  std::array<uint32_t, 6> deposit[2];
  std::vector<char> stack = std::vector<char>(kStack);
  struct Copy {
    void* to;
    const void* from;  // null: zeros
    unsigned bytes;
    int group;
  };
  std::vector<Copy> copies;  // that it has not waited for
  int groups = 0;            // that it has ended
  struct Product {
    int group;
    std::function<void()> make;
  };
  std::vector<Product> products;  // of its warpgroup, that it has not waited for
  int groups_of_products = 0;
  bool has_waited = false;  // for the kernels before
};

extern std::vector<Fiber> fibers;
extern bool begins_early;  // the launch
extern std::minstd_rand coins;
extern std::vector<std::function<void()>> bulk_copies;  // on their way

}  // namespace on_host
