// SPDX-License-Identifier: Apache-2.0
// The part of the C++ library that the headers of formats, rules and core use. NVRTC has no such library: it gets this
// text under the names of the standard headers.
#pragma once

#define LOWBIT_INLINE __forceinline__
#define LOWBIT_ALWAYS_INLINE __forceinline__
#define LOWBIT_NOINLINE LOWBIT_INLINE

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

constexpr int32_t INT32_MAX = 0x7fffffff, INT32_MIN = -INT32_MAX - 1;
constexpr float FLT_MAX = 0x1.fffffep127f;

LOWBIT_INLINE float __builtin_inff() { return __int_as_float(0x7f800000); }
LOWBIT_INLINE float __builtin_nanf(const char*) { return __int_as_float(0x7fc00000); }
LOWBIT_INLINE float __builtin_fmaf(float a, float b, float c) { return __fmaf_rn(a, b, c); }

namespace std {

using size_t = decltype(sizeof(0));

template <class T, size_t count>
constexpr size_t size(const T (&)[count]) { return count; }

template <class T, size_t count>
struct array {
  T element[count];
  constexpr T& operator[](size_t i) { return element[i]; }
  constexpr const T& operator[](size_t i) const { return element[i]; }
};

struct string_view {
  const char* text;
  constexpr string_view(const char* text) : text(text) {}
};

template <bool, class A, class> struct choose { using type = A; };
template <class A, class B> struct choose<false, A, B> { using type = B; };
template <bool condition, class A, class B>
using conditional_t = typename choose<condition, A, B>::type;

inline void* memcpy(void* to, const void* from, size_t bytes) { return ::memcpy(to, from, bytes); }
inline double fmin(double a, double b) { return ::fmin(a, b); }
inline double fmax(double a, double b) { return ::fmax(a, b); }
inline double sqrt(double a) { return ::sqrt(a); }

// Powers of counts of steps by squaring: 34 products for a step of 100,000, where CUDA's pow is some 200 operations
// in double.
inline double pow(double base, double exponent) {
  if (!(exponent >= 0 && exponent < 0x1p53)) return ::pow(base, exponent);
  auto left = static_cast<uint64_t>(exponent);
  if (static_cast<double>(left) != exponent) return ::pow(base, exponent);
  double power = 1;
  for (; left; left >>= 1, base *= base)
    if (left & 1) power *= base;
  return power;
}

}  // namespace std
