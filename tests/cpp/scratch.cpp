// SPDX-License-Identifier: Apache-2.0
// The stack of scratch memory (csrc/core/scratch.hpp): pieces that are held at once never overlap, and a pattern that
// repeats takes no memory of the system any more. Started by tests/cpp/test_scratch.py, under AddressSanitizer.
#include "core/scratch.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

using namespace lowbit;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

// Takes pieces inside of each other, fills each with its own number, and finds it there when the inner ones are gone.
void nest(std::mt19937& generator, int depth) {
  const int64_t bytes = std::uniform_int_distribution<int64_t>(0, 20000)(generator);
  const Scratch piece(bytes);
  unsigned char* const data = piece.as<unsigned char>();
  require(reinterpret_cast<uintptr_t>(data) % 64 == 0, "a piece is not aligned");
  std::memset(data, depth, static_cast<std::size_t>(bytes));
  for (int inner = 0; depth && inner < 2; inner++) nest(generator, depth - 1);
  for (int64_t i = 0; i < bytes; i++) require(data[i] == depth, "a piece was written by another");
}

void run() {
  for (uint32_t seed = 0; seed < 20; seed++) {
    std::mt19937 generator(seed);
    nest(generator, 6);
  }
  const void* kept[3] = {};
  for (int call = 0; call < 3; call++) {
    const Scratch outer(300 << 10), inner(500 << 10);
    kept[call] = inner.as<void>();
    const int64_t apart = inner.as<char>() - outer.as<char>();
    require(call == 0 || (apart >= 300 << 10 && apart < 310 << 10), "a repeated call has its pieces in two blocks");
  }
  require(kept[1] == kept[2], "the same calls got other memory");
  try {
    const Scratch held(100);
    const Scratch impossible(int64_t{1} << 60);
    require(false, "more memory than there is");
  } catch (const std::bad_alloc&) {
  }
  std::mt19937 generator(1);
  nest(generator, 3);  // what failed left the stack as it was
}

}  // namespace

int main() {
  run();
  std::thread(run).join();
  std::puts("a stack holds");
}
