// SPDX-License-Identifier: Apache-2.0
// Checks of the functions of cpu/simd/ and cpu/vector_io.hpp that read vectors from memory and write them there.
#pragma once

#include "cpu/vector_io.hpp"
#include "sixteen_bits.hpp"

namespace {

constexpr auto kElements = [](const auto& a) { return a; };
// Lane i is element from(i).
template <class R, class From>
auto lanes_from(From&& from) {
  return [from](const auto& a) { return made<Element<R>, Lanes<R>{}.size()>([&](int i) { return a[from(i)]; }); };
}
template <class R, class From>
auto sixteen_bits_from(const SixteenBits& format, From&& from) {
  return [format, from](const auto& a) {
    return made<float, Lanes<R>{}.size()>([&](int i) { return format.read(a[from(i)]); });
  };
}
constexpr auto kSame = [](int i) { return i; };
constexpr int low_nibble(uint8_t byte) { return byte % 16; }
constexpr int high_nibble(uint8_t byte) { return byte / 16; }

void check_loads() {
  loads<16>(FUNCTION(load, f32x16(const float*)), kElements);
  loads<16>(FUNCTION(load, f64x16(const double*)), kElements);
  loads<8>(FUNCTION(load8, f32x8(const float*)), kElements);
  loads<16>(FUNCTION(load_f16, f32x16(const uint16_t*)), sixteen_bits_from<f32x16>(kFloat16, kSame));
  loads<16>(FUNCTION(load_bf16, f32x16(const uint16_t*)), sixteen_bits_from<f32x16>(kBFloat16, kSame));
  loads<16>(FUNCTION(load_i32, i32x16(const int32_t*)), kElements);
  loads<16>(FUNCTION(load_u8, i32x16(const uint8_t*)), lanes_from<i32x16>(kSame));
  loads<64>(FUNCTION(load_codes, u8x64(const uint8_t*)), kElements);
  loads<32>(FUNCTION(load_i16, i16x32(const int16_t*)), kElements);
  loads<2>(FUNCTION(load_pair, i16x32(const int16_t*)), lanes_from<i16x32>([](int i) { return i % 2; }));
  loads<2>(FUNCTION(repeat_two, f32x8(const float*)), lanes_from<f32x8>([](int i) { return i % 2; }));
  loads<4>(FUNCTION(repeat_four, f32x8(const float*)), lanes_from<f32x8>([](int i) { return i % 4; }));
  using OfBytes = Function<Twice(const uint8_t*)>;
  loads<32>(OfBytes{"load_32_u8 void(const uint8_t*, f32x16&, f32x16&)",
                    [](const uint8_t* p) { Twice r; load_32_u8(p, r.a, r.b); return r; }},
            [](const auto& a) { return made<float, 32>([&](int i) { return 0x1p23f + a[i]; }); });
  loads<16>(OfBytes{"load_32_u4 void(const uint8_t*, f32x16&, f32x16&)",
                    [](const uint8_t* p) { Twice r; load_32_u4(p, r.a, r.b); return r; }},
            [](const auto& a) {
              return made<float, 32>(
                  [&](int i) { return 0x1p23f + (i % 2 ? low_nibble(a[i / 2]) : high_nibble(a[i / 2])); });
            });
  // Out of order only between the two functions: no element is lost, none is there twice.
  report.checks("ordered_bf16 f32x16(f32x16)");
  loads<16>(Function<f32x16(const uint16_t*)>{"load_bf16_unordered f32x16(const uint16_t*)",
                                              [](const uint16_t* p) { return ordered_bf16(load_bf16_unordered(p)); }},
            sixteen_bits_from<f32x16>(kBFloat16, kSame));
}

void check_pairs_and_halves() {
  loads<16>(FUNCTION(zip_i8, i16x32(const int8_t*, const int8_t*)), [](const auto& a, const auto& b) {
    return made<int16_t, 32>([&](int i) { return (i % 2 ? b : a)[i / 2]; });
  });
  loads<16>(FUNCTION(zip_i4<false>, i16x32(const uint8_t*, const uint8_t*)), [](const auto& a, const auto& b) {
    return made<int16_t, 32>([&](int i) { return low_nibble((i % 2 ? b : a)[i / 2]) - 8; });
  });
  loads<16>(FUNCTION(zip_i4<true>, i16x32(const uint8_t*, const uint8_t*)), [](const auto& a, const auto& b) {
    return made<int16_t, 32>([&](int i) { return high_nibble((i % 2 ? b : a)[i / 2]) - 8; });
  });
  lanewise(FUNCTION(in_register, i16x32(i16x32)), [](int16_t a) { return a; });
  whole(FUNCTION(add_pairs, i32x16(i32x16, i16x32, i16x32)), [](const auto& sum, const auto& a, const auto& b) {
    return made<int32_t, 16>([&](int i) { return sum[i] + a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]; });
  }, [](auto& sum, auto& a, auto& b) {  // the sum fits into 32 bits
    for (int32_t& lane : sum) lane = within(lane, -65535, 65535);
    for (auto* lanes : {&a, &b})
      for (int16_t& lane : *lanes) lane = static_cast<int16_t>(lane == INT16_MIN ? INT16_MAX : lane);
  });
  // Eight elements to a half, and the same eight in the other.
  const auto in_halves = [](int i) { return i / 16 * 8 + i % 8; };
  loads<16>(FUNCTION(twice, Twice(const float*)), lanes_from<Twice>(in_halves));
  loads<16>(FUNCTION(twice_f16, Twice(const uint16_t*)), sixteen_bits_from<Twice>(kFloat16, in_halves));
  loads<16>(FUNCTION(twice_bf16, Twice(const uint16_t*)),
            sixteen_bits_from<Twice>(kBFloat16, [](int i) { return i / 16 * 4 + i % 8 / 4 * 8 + i % 4; }));
  loads<16>(FUNCTION(twice_i8, i16x32(const int8_t*)), lanes_from<i16x32>([](int i) { return i % 16; }));
  loads<16>(FUNCTION(twice_i4, TwiceCodes(const uint8_t*)), [](const auto& a) {
    return made<int16_t, 64>([&](int i) { return (i < 32 ? low_nibble(a[i % 16]) : high_nibble(a[i % 16])) - 8; });
  });
  const auto of_half = [](const auto&... all) {  // lane i: of half i / 4 of vector i % 4
    return [=](int i) {
      const std::array each{all...};
      return [half = each[i % 4], begin = i / 4 * 8](int n) { return half[begin + n]; };
    };
  };
  whole(FUNCTION(half_sums, f32x8(f32x16, f32x16, f32x16, f32x16)), [&](const auto&... all) {
    return made<float, 8>([&](int i) {
      const auto q = of_half(all...)(i);
      return ((q(0) + q(2)) + (q(1) + q(3))) + ((q(4) + q(6)) + (q(5) + q(7)));
    });
  });
  whole(FUNCTION(half_sums, f32x8(i32x16, i32x16, i32x16, i32x16)), [&](const auto&... all) {
    return made<float, 8>([&](int i) {
      const auto q = of_half(all...)(i);
      return static_cast<float>(q(0) + q(1) + q(2) + q(3) + q(4) + q(5) + q(6) + q(7));
    });
  }, [](auto&... all) {
    const auto small = [](auto& a) { for (int32_t& lane : a) lane = within(lane, -(1 << 28), (1 << 28) - 1); };
    (small(all), ...);
  });
}

// The lanes of `out` as rows with a stride, of which nothing else is written.
template <std::size_t kRows>
void stores_rows(Function<void(float*, int64_t, f32x8)> f) {
  constexpr std::size_t kColumns = 8 / kRows, kStride = kColumns + 3, kCount = (kRows - 1) * kStride + kColumns;
  report.checks(f.text);
  Guarded memory;
  for_arguments<f32x8>([&](const auto& lanes) {
    memory.at_each_place<float>(kCount, [&](float* to) {
      std::vector<float> wanted(to, to + kCount), got = wanted;
      for (std::size_t i = 0; i < 8; i++) wanted[i / kColumns * kStride + i % kColumns] = lanes[i];
      f.call(to, kStride, vector_of<f32x8>(lanes));
      std::memcpy(got.data(), to, kCount * sizeof(float));
      expect(f.text, wanted, got);
      if (!memory.only_changed(to, kCount * sizeof(float)) && report.fails(f.text))
        std::printf("it writes more than its rows\n");
    });
  });
}

template <int kSize, class T>
void transposes(Function<void(const T*, int64_t, T*, int64_t)> f) {
  constexpr int kFrom = kSize + 3, kTo = kSize + 5;
  report.checks(f.text);
  Random random(11);
  std::vector<T> from((kSize - 1) * kFrom + kSize), to((kSize - 1) * kTo + kSize);
  for (T& x : from) x = drawn<T>(random);
  std::vector<T> wanted = to;
  for (int i = 0; i < kSize; i++) for (int j = 0; j < kSize; j++) wanted[j * kTo + i] = from[i * kFrom + j];
  Guarded source, target;
  source.at_each_place<T>(from.size(), [&](T* begin) {
    std::memcpy(begin, from.data(), from.size() * sizeof(T));
    target.at_each_place<T>(to.size(), [&](T* result) {
      std::memcpy(result, to.data(), to.size() * sizeof(T));
      f.call(begin, kFrom, result, kTo);
      expect(f.text, wanted, std::vector<T>(result, result + to.size()));
      if (!target.only_changed(result, to.size() * sizeof(T)) && report.fails(f.text)) std::printf("it writes more\n");
    });
  });
}

// Codes of 8 bits, or of 4, two to a byte: the lanes plus an offset, which fit into 16 bits.
template <std::size_t kBytes>
void stores_codes(Function<void(uint8_t*, i32x16, i32x16, int)> f) {
  stores<kBytes>(f, [](const auto& a, const auto& b, const auto& offset) {
    const auto code = [&](int i) {
      const int sum = (i < 16 ? a : b)[i % 16] + offset[0];
      return sum < 0 ? 0 : sum > 255 ? 255 : sum;
    };
    return made<uint8_t, kBytes>([&](int i) { return kBytes == 32 ? code(i) : code(2 * i) * 16 + code(2 * i + 1); });
  }, [](auto& a, auto& b, auto& offset) {
    offset[0] = within(offset[0], -255, 255);
    for (auto* lanes : {&a, &b})  // of 4 bits no code is above 15: it is not saturated
      for (int32_t& lane : *lanes) lane = within(lane, -32768 + 255, kBytes == 32 ? 32767 - 255 : 15 - offset[0]);
  });
}

void check_stores() {
  stores<16>(FUNCTION(store, void(float*, f32x16)), kElements);
  stores<16>(FUNCTION(store, void(double*, f64x16)), kElements);
  stores<16>(FUNCTION(store_i32, void(int32_t*, i32x16)), kElements);
  stores_sixteen_bits(FUNCTION(store_f16, void(uint16_t*, f32x16)), kFloat16);
  stores_sixteen_bits(FUNCTION(store_bf16, void(uint16_t*, f32x16)), kBFloat16);
  stores<16>(FUNCTION(store_u8, void(uint8_t*, i32x16)), [](const auto& a) {
    return made<uint8_t, 16>([&](int i) { return a[i] < 0 ? 0 : a[i] > 255 ? 255 : a[i]; });
  });
  const auto fits = [](int32_t low, int32_t high) {
    return [=](auto& a) { for (int32_t& lane : a) lane = within(lane, low, high); };
  };
  stores<16>(FUNCTION(store_i8, void(int8_t*, i32x16)),
             [](const auto& a) { return made<int8_t, 16>([&](int i) { return a[i]; }); }, fits(-128, 127));
  stores<16>(FUNCTION(store_i16, void(int16_t*, i32x16)),
             [](const auto& a) { return made<int16_t, 16>([&](int i) { return a[i]; }); }, fits(-32768, 32767));
  stores_codes<32>(FUNCTION(store_32_u8, void(uint8_t*, i32x16, i32x16, int)));
  stores_codes<16>(FUNCTION(store_32_u4, void(uint8_t*, i32x16, i32x16, int)));
  stores_rows<2>(FUNCTION(store_two_rows, void(float*, int64_t, f32x8)));
  stores_rows<4>(FUNCTION(store_four_rows, void(float*, int64_t, f32x8)));
  transposes<16>(FUNCTION(transpose_16x16, void(const float*, int64_t, float*, int64_t)));
  transposes<16>(FUNCTION(transpose_16x16, void(const double*, int64_t, double*, int64_t)));
#if defined(LOWBIT_IS_SCALAR)
#elif defined(__aarch64__)
  transposes<4>(FUNCTION(transpose_4x4, void(const float*, int64_t, float*, int64_t)));
#else
  transposes<8>(FUNCTION(transpose_8x8, void(const float*, int64_t, float*, int64_t)));
#endif
}

void check_lookups() {
  alignas(64) static const auto table = made<float, 16>([](int i) { return 1 + i; });
  alignas(64) static const auto twice = made<float, 16>([](int i) { return 1 + i % 8; });
  whole(Function<f32x16(i32x16)>{"lookup8 f32x16(const float*, i32x16)",
                                 [](i32x16 i) { return lookup8(twice.data(), i); }},
        [](const auto& index) { return made<float, 16>([&](int i) { return 1 + (index[i] & 7); }); });
  whole(Function<f32x16(i32x16)>{"lookup16 f32x16(const float*, i32x16)",
                                 [](i32x16 i) { return lookup16(table.data(), i); }},
        [](const auto& index) { return made<float, 16>([&](int i) { return 1 + (index[i] & 15); }); });
}

// The tail of a row: `count` elements of any activation dtype, at an offset of some elements.
void check_tails() {
  const char* const load = "load_as_float f32x16(const void*, DType, int64_t, int64_t)";
  const char* const store = "store_from_float void(void*, DType, int64_t, int64_t, f32x16)";
  report.checks(load), report.checks(store);
  whole(FUNCTION(total, double(f32x16)), [](const auto& a) {
    double sum = 0;
    for (float lane : a) sum += static_cast<double>(lane);
    return sum;
  });
  Random random(7);
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16})
    for (int64_t count = 0; count <= 16; count++) {
      const auto given =
          made<float, 16>([&](int i) { return i < count ? static_cast<float>(random() % 512) - 256 : 0; });
      Guarded memory;
      const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
      memory.at_each_place<char>(bytes + 3 * size_of(dtype), [&](char* base) {
        store_from_float(base, dtype, 3, count, vector_of<f32x16>(given));
        const auto got = lanes_of(load_as_float(base, dtype, 3, count));
        expect(load, given, got);
        for (int64_t i = 0; i < count; i++) {  // exact in every dtype
          const char* p = base + (3 + i) * static_cast<int64_t>(size_of(dtype));
          float wide;
          uint16_t half;
          std::memcpy(&wide, p, dtype == DType::float32 ? 4 : 0), std::memcpy(&half, p, 2);
          if (dtype != DType::float32) wide = (dtype == DType::float16 ? kFloat16 : kBFloat16).read(half);
          expect(store, std::array{given[i]}, std::array{wide});
        }
        if (!memory.only_changed(base + 3 * size_of(dtype), bytes) && report.fails(store))
          std::printf("it writes behind its tail\n");
      });
    }
}

}  // namespace
