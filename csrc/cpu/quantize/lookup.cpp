// SPDX-License-Identifier: Apache-2.0
// The row of the op dequantize for selected rows of a weight. A task is some indices; a row of the weight is read 16
// codes at a time.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "cpu/loops.hpp"
#include "cpu/rows.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "formats/layout_codes.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// 8 bit-packed codes as bytes.
template <int kBits>
LOWBIT_INLINE void spread_codes(const uint8_t* in, uint8_t* out) {
  uint64_t stream = 0, bytes = 0;
  std::memcpy(&stream, in, kBits);
  if constexpr (kBits == 8) bytes = stream;
  else for (int i = 0; i < 8; i++) bytes |= (stream >> (kBits * i) & ((1u << kBits) - 1)) << (8 * i);
  std::memcpy(out, &bytes, 8);
}

// Codes k .. k + 16 of row n as bytes. Does not read past the end.
template <Format kFormat, class From>
LOWBIT_INLINE void codes_of_row(const DequantizeArgs& args, int64_t n, int64_t k, uint8_t* out) {
  constexpr int kBits = bits(kFormat);
  const uint8_t* weight = args.packed.as<const uint8_t>();
  if constexpr (std::is_same_v<From, RowMajorLayout>) {
    const uint8_t* codes = weight + args.sections.row(n) + args.sections.codes + k * kBits / 8;
    if (k + 16 <= args.spec.k) {
      spread_codes<kBits>(codes, out), spread_codes<kBits>(codes + kBits, out + 8);
      return;
    }
  }
  for (int64_t i = 0; i < smaller(16, args.spec.k - k); i++)
    out[i] = static_cast<uint8_t>(read_code<kFormat, From>(args.sections, weight, n, k + i));
}

template <Format kFormat, class From>
LOWBIT_INLINE f32x16 floats_of_row(const DequantizeArgs& args, int64_t n, int64_t k) {
  alignas(64) float values[16] = {};
  for (int64_t i = 0; i < smaller(16, args.spec.k - k); i++) {
    const auto code = static_cast<typename codec_of<kFormat>::Code>(
        read_code<kFormat, From>(args.sections, args.packed.as<const uint8_t>(), n, k + i));
    values[i] = codec_of<kFormat>::decode(code);
  }
  return load(values);
}

// Writes row n of the weight to row `at` of out.
template <Format kFormat, class From>
void decode_row(const DequantizeArgs& args, int64_t n, int64_t at) {
  const WeightSpec& spec = args.spec;
  auto put = [&](int64_t k, f32x16 values) {
    store_from_float(args.out.data, args.out.dtype, at * spec.k + k, spec.k - k, values);
  };
  if constexpr (is_float(kFormat)) {
    for (int64_t k = 0; k < spec.k; k += 16) put(k, floats_of_row<kFormat, From>(args, n, k));
  } else {
    for (int64_t g = 0; g < spec.groups(); g++) {
      const auto of = read_scale(symmetric_zero(kFormat), spec, args.sections, args.packed.as<const uint8_t>(), n, g);
      const float scale = of.column_scale * of.group_scale;
      for (int64_t k = g * spec.group_k(); k < smaller(spec.k, (g + 1) * spec.group_k()); k += 16) {
        alignas(16) uint8_t codes[16] = {};
        codes_of_row<kFormat, From>(args, n, k, codes);
        put(k, mul(sub(codec_of<kFormat>::level_of(load_u8(codes)), set1(of.zero)), set1(scale)));
      }
    }
  }
}

LOWBIT_INLINE int64_t index_at(const TensorView& indices, int64_t at) {
  return indices.dtype == DType::int64 ? indices.as<const int64_t>()[at] : indices.as<const int32_t>()[at];
}

template <Format kFormat, class From>
void decode_rows(const DequantizeArgs& args) {
  const int64_t count = args.indices.numel(), n = args.spec.n;
  for (int64_t at = 0; at < count; at++) {
    const int64_t index = index_at(args.indices, at);
    if (index < 0 || index >= n) {
      *args.outside = at;
      return;
    }
  }
  const RowTiles tasks(count, larger(1, kSerialProducts / 16 / args.spec.k));
  parallel_for(tasks.count, threads_worth(4 * count * args.spec.k), [&](int64_t task) {
    for (int64_t at = tasks.begin(task); at < tasks.begin(task + 1); at++)
      decode_row<kFormat, From>(args, index_at(args.indices, at), at);
  });
}

void run_lookup(const DequantizeArgs& args) {
  with_format(args.spec.format, [&]<Format kFormat>() {
    with_layout(args.layout, [&]<class From>() { decode_rows<kFormat, From>(args); });
  });
}

std::string_view refuses(const DequantizeArgs& args) { return args.indices ? "" : "all of the weight is wanted"; }

constexpr Kernel<DequantizeArgs> kRows[] = {{LOWBIT_ROW("dequantize_rows"), refuses, run_lookup}};

}  // namespace

void quantize_lookup_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
