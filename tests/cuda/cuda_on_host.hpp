// SPDX-License-Identifier: Apache-2.0
// Device sources on the host: what NVRTC predefines, for g++. All that is no template is compiled once (*_on_host.cpp)
// and linked to every kernel.
#pragma once

#include "std_on_host.hpp"

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x = 0; };

namespace on_host {

enum class State { runs, at_warp, at_barrier, done };

extern unsigned current;  // the thread that runs
extern unsigned dynamic_bytes;  // of shared memory: as much as the launch says

void wait(State state);
void end_launch(const char* why);

// Hands words over to the warp, waits until all its threads have, and says where those of a lane are.
struct Exchanged {
  unsigned warp;
  int slot;
  const std::array<uint32_t, 6>& of(unsigned lane) const;
};
Exchanged exchange(const std::array<uint32_t, 6>& words);

// Shared memory of one declaration, between guards.
constexpr size_t kGuard = 1024;
void add_shared(unsigned char* guarded, size_t bytes);
template <class T, int line>
T& shared() {
  alignas(kGuard) static unsigned char guarded[kGuard + sizeof(T) + kGuard];
  static const bool first = (add_shared(guarded, sizeof(T)), true);
  static_cast<void>(first);
  return *reinterpret_cast<T*>(guarded + kGuard);
}

// Memory that the launch brings.
void fail_for_dynamic_bytes(size_t used);
template <class T, int line>
T& dynamic_shared() {
  if (sizeof(T) > dynamic_bytes) fail_for_dynamic_bytes(sizeof(T));
  return shared<T, line>();
}

uint32_t shuffled(uint32_t word, unsigned lane);
template <class T>
T shuffled(T value, unsigned lane) {
  static_assert(sizeof(T) == 4);
  return __builtin_bit_cast(T, shuffled(__builtin_bit_cast(uint32_t, value), lane));
}

}  // namespace on_host

inline Dim blockIdx, gridDim;
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
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline int __float2int_rn(float a) {  // nan: 0; what does not fit: the nearest that does
  return a != a ? 0 : a >= 0x1p31f ? INT32_MAX : a < -0x1p31f ? INT32_MIN : static_cast<int>(nearbyintf(a));
}

// Words that only printed score programs use.
#define __device__
#define __forceinline__ inline
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T atomicExch(T* p, T value) {
  const T before = *p;
  return *p = value, before;
}
template <class T>
T atomicAdd(T* p, T value) { return atomicExch(p, *p + value); }
inline unsigned atomicMax(unsigned* p, unsigned value) { return atomicExch(p, value > *p ? value : *p); }
inline double __longlong_as_double(long long a) { return __builtin_bit_cast(double, a); }
inline long long __double2ll_rn(double a) { return llrint(a); }

template <class T>
void __stcs(T* to, T value) { *to = value; }
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned count) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (count < 32 ? count : 32));
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
#include "early_on_host.hpp"

// The emulated driver calls it; false: threads wait for each other for ever or left others waiting, or shared memory
// was written outside of its bounds, or a kernel that begins early does not wait for those before it.
extern "C" bool lowbit_run_grid(void (*kernel)(const void*), const void* args, unsigned ctas, unsigned threads,
                                unsigned shared_bytes, unsigned seed, bool early);
