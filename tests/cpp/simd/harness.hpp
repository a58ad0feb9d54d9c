// SPDX-License-Identifier: Apache-2.0
// The parts that checks of cpu/simd/ share: a function with its name, the lanes of its vectors, arguments to call it
// with, and the comparison of its result with that of a reference in plain C++. References are written here and not
// taken from cpu/simd/scalar.hpp, which is one of the headers under test.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using namespace lowbit;
using namespace lowbit::cpu::LOWBIT_ISA_NAME;

// A function of the vocabulary, and its text as tests/cpp/test_simd.py reads it from the header.
template <class Signature>
struct Function {
  const char* text;
  std::add_pointer_t<Signature> call;
};
#define FUNCTION(name, ...) \
  (Function<__VA_ARGS__>{#name " " #__VA_ARGS__, static_cast<std::add_pointer_t<__VA_ARGS__>>(name)})

template <class T> struct Lane { using Type = T; };  // a scalar is one lane
template <> struct Lane<f32x16> { using Type = float; };
template <> struct Lane<f32x8> { using Type = float; };
template <> struct Lane<Twice> { using Type = float; };
template <> struct Lane<f64x16> { using Type = double; };
template <> struct Lane<i32x16> { using Type = int32_t; };
template <> struct Lane<i16x32> { using Type = int16_t; };
template <> struct Lane<TwiceCodes> { using Type = int16_t; };
template <> struct Lane<u8x64> { using Type = uint8_t; };
template <class T> using Element = typename Lane<T>::Type;
template <class T> using Lanes = std::array<Element<T>, sizeof(T) / sizeof(Element<T>)>;
template <class T> using Result = std::conditional_t<Lanes<T>{}.size() == 1, Element<T>, Lanes<T>>;

// Every header keeps lanes in memory order, and a vector is made and read here by its bytes alone.
template <class T> Lanes<T> lanes_of(const T& vector) { return std::bit_cast<Lanes<T>>(vector); }
template <class T> T vector_of(const Lanes<T>& lanes) { return std::bit_cast<T>(lanes); }
template <class T, std::size_t count> std::array<T, count> as_lanes(const std::array<T, count>& a) { return a; }
template <class T> std::array<T, 1> as_lanes(T a) { return {a}; }

// The bits, but any nan is as good as another.
template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b);
}

struct Report {
  int failed = 0;
  const char* last = nullptr;

  void checks(const char* text) { std::printf("%s\n", text); std::fflush(stdout); }
  // True for the first failure of a function: one is told.
  bool fails(const char* text) {
    if (last == text) return false;
    last = text, failed++;
    std::printf("FAILED %s: ", text);
    return true;
  }
} report;

template <class T>
void print(T value) {
  if constexpr (std::is_floating_point_v<T>) std::printf("%a", static_cast<double>(value));
  else std::printf("%lld", static_cast<long long>(value));
}

template <class T, std::size_t count, class... More>
void expect(const char* text, const std::array<T, count>& wanted, const std::array<T, count>& got,
            const More&... given) {
  for (std::size_t i = 0; i < count; i++) {
    if (same(wanted[i], got[i])) continue;
    if (!report.fails(text)) return;
    std::printf("lane %zu is ", i), print(got[i]), std::printf(", not "), print(wanted[i]), std::printf("; given");
    ((std::printf(" "), print(given[i < given.size() ? i : 0])), ...);
    std::printf("\n");
    return;
  }
}
template <class T>
void expect(const char* text, const std::vector<T>& wanted, const std::vector<T>& got) {
  for (std::size_t i = 0; i < wanted.size(); i++)
    if (!same(wanted[i], got[i])) {
      if (report.fails(text))
        std::printf("element %zu is ", i), print(got[i]), std::printf(", not "), print(wanted[i]), std::printf("\n");
      return;
    }
}

// Values at which functions change: of up to 16 bits all values, of others limits, powers of two, halves, nan ..
template <class T>
const std::vector<T>& corners() {
  static const std::vector<T> all = [] {
    std::vector<T> r;
    if constexpr (sizeof(T) <= 2) {
      for (int i = 0; i < 1 << 8 * sizeof(T); i++) r.push_back(static_cast<T>(i));
    } else if constexpr (std::is_floating_point_v<T>) {
      using Limits = std::numeric_limits<T>;
      for (const T x :
           {T{0}, Limits::denorm_min(), Limits::min() - Limits::denorm_min(), Limits::min(), Limits::max(),
            Limits::infinity(), Limits::quiet_NaN(), T{0.5}, T{1}, std::nextafter(T{1}, T{2}), T{1.5}, T{2.5}, T{3},
            T(0x1.fffffep-2), T(0x1p23), T(0x1.000002p23), T(0x1p31), T(0x1.fffffep30)})
        r.push_back(x), r.push_back(-x);
    } else {
      for (const int64_t x : {0, 1, 2, 15, 16, 31, 32, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 0x1000001})
        r.push_back(static_cast<T>(x)), r.push_back(static_cast<T>(-x));
      r.push_back(std::numeric_limits<T>::max()), r.push_back(std::numeric_limits<T>::min());
    }
    return r;
  }();
  return all;
}

using Random = std::mt19937_64;
template <class T>
T drawn(Random& random) {  // half of the floats of any magnitude, half about 1; integers of any width
  const uint64_t bits = random();
  if constexpr (std::is_floating_point_v<T>) {
    if (bits & 1) return std::normal_distribution<T>()(random);
    T x;
    std::memcpy(&x, &(const uint64_t&)(bits >> 1), sizeof x);
    return x;
  } else {
    return static_cast<T>(static_cast<int64_t>(bits) >> (bits % 64));
  }
}

// Number i of the arguments of a function: every combination of corners, if that is less than a million,
// then drawn ones.
template <class... T>
struct Arguments {
  static constexpr uint64_t kDrawn = 1 << 15, kMost = 1 << 20;
  std::tuple<std::vector<T>...> all{corners<T>()...};
  uint64_t combinations = (uint64_t{1} * ... * corners<T>().size());
  Random random{20240607};

  uint64_t count() const { return (combinations <= kMost ? combinations : 0) + kDrawn; }
  std::tuple<T...> at(uint64_t i) {
    const bool corner = i < combinations && combinations <= kMost;
    const auto next = [&]<class E>(const std::vector<E>& values) {
      if (!corner) return random() % 8 ? drawn<E>(random) : values[random() % values.size()];
      const E value = values[i % values.size()];
      i /= values.size();
      return value;
    };
    return std::apply([&](const auto&... values) { return std::tuple<T...>{next(values)...}; }, all);
  }
};

// Calls use(lanes of an A..) until every argument had its turn in some lane; an A with fewer lanes takes the first.
template <class... A, class Use>
void for_arguments(Use&& use) {
  constexpr std::size_t kWidth = std::max({Lanes<A>{}.size()...});
  Arguments<Element<A>...> arguments;
  std::tuple<Lanes<A>...> lanes;
  for (uint64_t i = 0; i < arguments.count(); i += kWidth) {
    for (std::size_t lane = 0; lane < kWidth; lane++) {
      const auto one = arguments.at(i + lane);
      [&]<std::size_t... n>(std::index_sequence<n...>) {
        ((lane < std::get<n>(lanes).size() ? void(std::get<n>(lanes)[lane] = std::get<n>(one)) : void()), ...);
      }(std::index_sequence_for<A...>{});
    }
    std::apply(use, lanes);
  }
}

// References and domains by std::function: a check is compiled once for a signature, and not for each function.
template <class T> using Given = Lanes<std::remove_cvref_t<T>>;
template <class Signature> using Call = std::type_identity_t<std::function<Signature>>;

// A function over vectors is what `reference` says of their lanes; `domain` changes lanes to what the function takes.
template <class R, class... A>
void whole(Function<R(A...)> f, Call<Result<R>(const Given<A>&...)> reference, Call<void(Given<A>&...)> domain = {}) {
  report.checks(f.text);
  for_arguments<std::remove_cvref_t<A>...>([&](auto&... lanes) {
    if (domain) domain(lanes...);
    const auto got = f.call(vector_of<std::remove_cvref_t<A>>(lanes)...);
    expect(f.text, as_lanes(reference(lanes...)), lanes_of(got), lanes...);
  });
}
// Likewise, each lane by itself.
template <class R, class... A>
void lanewise(Function<R(A...)> f, Call<Element<R>(Element<A>...)> reference, Call<void(Element<A>&...)> domain = {}) {
  whole(
      f,
      [&](const auto&... lanes) {
        Lanes<R> wanted;
        for (std::size_t i = 0; i < wanted.size(); i++) wanted[i] = reference(lanes[i]...);
        return wanted;
      },
      [&](auto&... lanes) {
        for (std::size_t i = 0; domain && i < Lanes<R>{}.size(); i++) domain(lanes[i]...);
      });
}

template <int kCount, class Use>
void for_each_number(Use&& use) {  // use(std::integral_constant<int, 0>) ..
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (use(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Another number for one outside of low .. high.
inline int32_t within(int32_t x, int32_t low, int32_t high) {
  if (x >= low && x <= high) return x;
  return static_cast<int32_t>(low + static_cast<int64_t>(static_cast<uint32_t>(x)) % (int64_t{high} - low + 1));
}

}  // namespace
