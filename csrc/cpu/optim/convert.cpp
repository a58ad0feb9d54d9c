// SPDX-License-Identifier: Apache-2.0
// Rows of the ops encode_state and decode_state. One task is one block.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "cpu/optim/moment.hpp"
#include "cpu/rows.hpp"
#include "ops/optim.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <class Args, class Body>
LOWBIT_INLINE void for_each_block(const Args& args, Body&& body) {  // calls body(block, first element, elements)
  const int64_t numel = args.values.numel();
  parallel_for(ceil_div(numel, args.block_size), threads_worth(8 * numel), [&](int64_t block) {
    const int64_t begin = block * args.block_size;
    body(block, begin, smaller(args.block_size, numel - begin));
  });
}

template <StateFormat kFormat, bool kSigned>
void encode_all(const EncodeStateArgs& args) {
  for_each_block(args, [&](int64_t block, int64_t begin, int64_t count) {
    alignas(64) float values[kMaxStateBlock];
    i32x16 absmax = set1(0);
    for (int64_t i = 0; i < round_up(count, kGroup); i += 16) {
      f32x16 value = load_as_float(args.values.data, DType::float32, begin + i, count - i);
      if (!kSigned) value = max(set1(0.0f), value);  // keeps nan
      store(values + i, value);
      absmax = max(absmax, bits_of(abs(value)));
    }
    encode_block<kFormat, kSigned>(absmax, 1.0f, count, values, args.codes.as<uint8_t>() + state_bytes(kFormat, begin),
                                   args.scale.as<float>() + block);
  });
}

template <StateFormat kFormat, bool kSigned>
void decode_all(const DecodeStateArgs& args) {
  for_each_block(args, [&](int64_t block, int64_t begin, int64_t count) {
    const uint8_t* codes = args.codes.as<const uint8_t>() + state_bytes(kFormat, begin);
    const typename StateCodes<kFormat, kSigned>::Decoder decoder(args.scale.as<const float>()[block]);
    for (int64_t i = 0; i < count; i += kGroup) {
      f32x16 value[2], factor[2];
      decode_group<kFormat>(decoder, codes + state_bytes(kFormat, i), count - i, value, factor);
      for (int half = 0; half < 2; half++)
        store_from_float(args.values.data, DType::float32, begin + i + 16 * half, count - i - 16 * half,
                         mul(value[half], factor[half]));
    }
  });
}

template <StateFormat kFormat, class Args>
std::string_view refuses(const Args& args) {
  return args.format == kFormat ? "" : "another state format";
}

template <StateFormat kFormat>
void encode(const EncodeStateArgs& args) {
  args.is_signed ? encode_all<kFormat, true>(args) : encode_all<kFormat, false>(args);
}
template <StateFormat kFormat>
void decode(const DecodeStateArgs& args) {
  args.is_signed ? decode_all<kFormat, true>(args) : decode_all<kFormat, false>(args);
}

#define LOWBIT_ENCODE_ROW(format) \
  {LOWBIT_ROW("encode_state_" #format), refuses<StateFormat::format, EncodeStateArgs>, encode<StateFormat::format>}
#define LOWBIT_DECODE_ROW(format) \
  {LOWBIT_ROW("decode_state_" #format), refuses<StateFormat::format, DecodeStateArgs>, decode<StateFormat::format>}
constexpr Kernel<EncodeStateArgs> kEncodeRows[] = {LOWBIT_ENCODE_ROW(dynamic8), LOWBIT_ENCODE_ROW(dynamic4),
                                                   LOWBIT_ENCODE_ROW(float8)};
constexpr Kernel<DecodeStateArgs> kDecodeRows[] = {LOWBIT_DECODE_ROW(dynamic8), LOWBIT_DECODE_ROW(dynamic4),
                                                   LOWBIT_DECODE_ROW(float8)};

}  // namespace

void optim_convert_rows(Backend& backend) { add(backend, kEncodeRows), add(backend, kDecodeRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
