// SPDX-License-Identifier: Apache-2.0
// Device sources on the host: what NVRTC predefines, for g++. One fiber per CUDA thread; a CTA is run to its end before
// the next. It looks for faults: threads run in an order that a seed shuffles, from one collective operation to the
// next, and whole warps fall behind; shared memory is full of nan bits before each CTA; threads that wait for what can
// never come are found.
#pragma once

#include <sanitizer/asan_interface.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <random>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x = 0; };

namespace on_host {

constexpr std::size_t kStack = 64 << 10;
enum class State { runs, at_warp, at_barrier, done };

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
};

inline std::vector<Fiber> fibers;
inline unsigned current = 0;
inline jmp_buf scheduler;
inline void (*body)(const void*) = nullptr;
inline const void* arguments = nullptr;
inline bool failed = false;  // a thread has ended the launch
inline std::minstd_rand coins;
inline std::vector<std::function<void()>> bulk_copies;  // on their way

inline void wait(State state) {
  fibers[current].state = state;
  if (_setjmp(fibers[current].resume) == 0) _longjmp(scheduler, 1);
}

inline void run_body() {
  body(arguments);
  wait(State::done);
}

[[gnu::noinline]] inline void resume(unsigned index) {
  current = index;
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = fibers[index];
  if (fiber.begun) _longjmp(fiber.resume, 1);
  fiber.begun = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.data(), fiber.start.uc_stack.ss_size = kStack, fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, run_body, 0);
  setcontext(&fiber.start);
}

// Lets threads [from, to) go on if all of them have come to `state`.
inline void release(unsigned from, unsigned to, State state) {
  for (unsigned i = from; i < to; i++)
    if (fibers[i].state != state) return;
  for (unsigned i = from; i < to; i++) fibers[i].state = State::runs;
}

inline bool run_cta(unsigned threads, std::mt19937& random) {
  if (fibers.size() != threads) fibers = std::vector<Fiber>(threads);
  failed = false, coins.seed(random()), bulk_copies.clear();
  for (Fiber& fiber : fibers)
    fiber.state = State::runs, fiber.begun = false, fiber.collectives = fiber.groups = fiber.groups_of_products = 0,
    fiber.copies.clear(), fiber.products.clear();
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; i++) order[i] = i;
  for (uint64_t asleep = 0;;) {
    std::shuffle(order.begin(), order.end(), random);
    if (random() % 8 == 0) asleep = random();  // warps, for a while: the others get ahead as far as they can
    bool any = false, done = true;
    for (const unsigned i : order) {
      if (fibers[i].state != State::runs || (asleep >> i / 32 & 1)) continue;
      any = true;
      resume(i);
      if (fibers[i].state == State::at_warp) release(i / 32 * 32, std::min(i / 32 * 32 + 32, threads), State::at_warp);
      if (fibers[i].state == State::at_barrier) release(0, threads, State::at_barrier);
    }
    for (const Fiber& fiber : fibers) done &= fiber.state == State::done;
    if (failed) return false;
    if (done) return true;
    if (!any && !asleep) return false;
    if (!any) asleep = 0;
  }
}

// Hands words over to the warp, waits until all its threads have, and says where those of a lane are.
struct Exchanged {
  unsigned warp;
  int slot;
  const std::array<uint32_t, 6>& of(unsigned lane) const { return fibers[warp * 32 + lane].deposit[slot]; }
};
inline Exchanged exchange(const std::array<uint32_t, 6>& words) {
  const unsigned me = current;
  const int slot = fibers[me].collectives++ & 1;
  fibers[me].deposit[slot] = words;
  wait(State::at_warp);
  return {me / 32, slot};
}

// Shared memory of one declaration, full of nan bits when a CTA begins, between guards that are whole when it ends.
// With AddressSanitizer (tools/sanitize) the guards cannot be read either.
constexpr std::size_t kGuard = 1024;
constexpr unsigned char kGuardByte = 0xa5;
inline std::vector<std::pair<unsigned char*, std::size_t>> all_shared;  // the first guard, and bytes of the memory
inline void poison(unsigned char* guarded, std::size_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(guarded, kGuard + bytes + kGuard);
  std::memset(guarded, kGuardByte, kGuard), std::memset(guarded + kGuard, 0xff, bytes);
  std::memset(guarded + kGuard + bytes, kGuardByte, kGuard);
  ASAN_POISON_MEMORY_REGION(guarded, kGuard), ASAN_POISON_MEMORY_REGION(guarded + kGuard + bytes, kGuard);
}
inline bool guards_are_whole() {
  const auto is_whole = [](const unsigned char* guard) {
    return std::all_of(guard, guard + kGuard, [](unsigned char byte) { return byte == kGuardByte; });
  };
  for (const auto& [guarded, bytes] : all_shared) {
    ASAN_UNPOISON_MEMORY_REGION(guarded, kGuard + bytes + kGuard);
    if (!is_whole(guarded) || !is_whole(guarded + kGuard + bytes)) {
      std::fprintf(stderr, "emulated CUDA: a CTA wrote outside of %zu bytes of shared memory\n", bytes);
      return false;
    }
  }
  return true;
}

template <class T, int line>
T& shared() {
  alignas(16) static unsigned char guarded[kGuard + sizeof(T) + kGuard];
  static const bool first = (poison(guarded, sizeof(T)), all_shared.emplace_back(guarded, sizeof(T)), true);
  static_cast<void>(first);
  return *reinterpret_cast<T*>(guarded + kGuard);
}

// Memory that the launch brings: as much as it says.
inline unsigned dynamic_bytes = 0;
template <class T, int line>
T& dynamic_shared() {
  if (sizeof(T) > dynamic_bytes) {
    std::fprintf(stderr, "emulated CUDA: a launch has %u bytes of shared memory, its kernel uses %zu\n", dynamic_bytes,
                 sizeof(T));
    failed = true, wait(State::done);
  }
  return shared<T, line>();
}

template <class T>
T shuffled(T value, unsigned lane) {
  static_assert(sizeof(T) == 4);
  return __builtin_bit_cast(T, exchange({__builtin_bit_cast(uint32_t, value)}).of(lane)[0]);
}

}  // namespace on_host

inline Dim blockIdx;
#define threadIdx (Dim{on_host::current})

#define LOWBIT_SHARED(Type, name, extents) auto& name = on_host::shared<Type extents, __LINE__>()
#define LOWBIT_DYNAMIC_SHARED(Type, name) auto& name = on_host::dynamic_shared<Type, __LINE__>()
#define LOWBIT_KERNEL(name, threads, Args) extern "C" void name(const Args& args)

inline void __syncthreads() { on_host::wait(on_host::State::at_barrier); }
inline void __syncwarp() { on_host::exchange({}); }
template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const unsigned me = on_host::current % 32, first = me / static_cast<unsigned>(width) * static_cast<unsigned>(width);
  return on_host::shuffled(value, first + static_cast<unsigned>(lane) % static_cast<unsigned>(width));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return on_host::shuffled(value, on_host::current % 32 ^ static_cast<unsigned>(mask));
}
inline bool __any_sync(unsigned, bool value) {
  const on_host::Exchanged values = on_host::exchange({value});
  bool any = false;
  for (unsigned lane = 0; lane < 32; lane++) any |= values.of(lane)[0] != 0;
  return any;
}

inline float __int_as_float(int a) { return __builtin_bit_cast(float, a); }
inline int __float_as_int(float a) { return __builtin_bit_cast(int, a); }
inline float __uint_as_float(unsigned a) { return __builtin_bit_cast(float, a); }
inline unsigned __float_as_uint(float a) { return __builtin_bit_cast(unsigned, a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline int __float2int_rn(float a) {  // nan: 0; what does not fit: the nearest that does
  return a != a ? 0 : a >= 0x1p31f ? INT32_MAX : a < -0x1p31f ? INT32_MIN : static_cast<int>(std::nearbyintf(a));
}

// Words that only printed score programs use.
#define __device__
#define __forceinline__ inline
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
template <class T>
T __ldg(const T* p) { return *p; }
inline int atomicExch(int* p, int value) { return std::exchange(*p, value); }
template <class T>
T atomicAdd(T* p, T value) { return std::exchange(*p, *p + value); }
inline unsigned atomicMax(unsigned* p, unsigned value) { return std::exchange(*p, std::max(*p, value)); }
inline double __longlong_as_double(long long a) { return __builtin_bit_cast(double, a); }
inline long long __double2ll_rn(double a) { return std::llrint(a); }

template <class T>
void __stcs(T* to, T value) { *to = value; }
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned count) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> std::min(count, 32u));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}

#include "prelude_on_host.hpp"
#include "mma_on_host.hpp"
#include "tiles_on_host.hpp"
#include "barrier_on_host.hpp"
#include "wgmma_on_host.hpp"

// The emulated driver calls it; false: threads wait for each other for ever or left others waiting, or shared memory
// was written outside of its bounds.
extern "C" inline __attribute__((used)) bool lowbit_run_grid(void (*kernel)(const void*), const void* args,
                                                             unsigned ctas, unsigned threads, unsigned shared_bytes,
                                                             unsigned seed) {
  std::mt19937 random(seed);
  on_host::dynamic_bytes = shared_bytes;
  on_host::body = kernel, on_host::arguments = args;
  for (unsigned i = 0; i < ctas; i++) {
    blockIdx.x = i;
    for (const auto& [memory, bytes] : on_host::all_shared) on_host::poison(memory, bytes);
    if (!on_host::run_cta(threads, random) || !on_host::guards_are_whole()) return false;
  }
  return true;
}
