// SPDX-License-Identifier: Apache-2.0
// The parts of the C++ library used by headers of formats, rules and core, for device compilers, which have none. The
// device adds functions that it implements itself, and the 64-bit integers, whose types differ.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;

constexpr int32_t INT32_MAX = 0x7fffffff, INT32_MIN = -INT32_MAX - 1;
constexpr float FLT_MAX = 0x1.fffffep127f;

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
  constexpr char operator[](size_t i) const { return text[i]; }
  constexpr size_t find(char wanted) const {  // which must be present
    size_t at = 0;
    while (text[at] != wanted) at++;
    return at;
  }
};

template <bool, class A, class> struct choose { using type = A; };
template <class A, class B> struct choose<false, A, B> { using type = B; };
template <bool condition, class A, class B>
using conditional_t = typename choose<condition, A, B>::type;
template <class A, class B> constexpr bool is_same_v = false;
template <class A> constexpr bool is_same_v<A, A> = true;

}  // namespace std
