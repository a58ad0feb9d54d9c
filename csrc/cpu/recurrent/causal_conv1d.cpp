// SPDX-License-Identifier: Apache-2.0
// The row of the op causal_conv1d. A task is some channels and some tokens of a sequence. A vector of channels walks
// over a few tokens with its last inputs in registers, then the next vector over the same ones: rows stay in L1. The
// first part of a sequence alone reads the state, and writes the new one, which may be the same memory: other parts
// begin behind more inputs than there are taps.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "cpu/recurrent/convolution.hpp"
#include "cpu/recurrent/refused.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct Part {  // a part of a sequence
  int64_t number;
  Sequence sequence;
  Span tokens, channels;
  bool is_first;
};

// Tokens of 16 channels from `channel` on.
template <int kCount>
void convolve(const CausalConv1dArgs& args, const Part& part, Span tokens, int64_t channel, const Lanes& taps,
              const float* bias, const Lanes& state) {
  const Rows x(args.x, part.sequence.batch, channel), y(args.y, part.sequence.batch, channel);
  f32x16 window[kCount];
  unroll<kCount - 1>([&](auto i) {
    window[i] = input_at(x, part.sequence, state, args.kept(), tokens.begin - (kCount - 1) + i);
  });
  for (int64_t token = tokens.begin; token < tokens.end; token++) {
    window[kCount - 1] = x.load(token);
    f32x16 sum = load(bias);
    unroll<kCount>([&](auto i) { sum = fma(load(taps[i]), window[i], sum); });
    y.store(token, args.silu ? silu(sum) : sum);
    unroll<kCount - 1>([&](auto i) { window[i] = window[i + 1]; });
  }
}

// The last inputs of the sequence.
void store_state(const CausalConv1dArgs& args, const Part& part, int64_t channel, const Lanes& before) {
  const Rows x(args.x, part.sequence.batch, channel);
  const int64_t kept = args.kept();
  alignas(64) Lanes after;
  for (int64_t i = 0; i < kept; i++)
    store(after[i], input_at(x, part.sequence, before, kept, part.sequence.end - kept + i));
  store_lanes(args.final_state, (part.number * args.channels() + channel) * kept, args.channels() - channel, kept,
              after);
}

void run_span(const CausalConv1dArgs& args, const Part& part) {
  const SpanTaps span(args, part.channels);
  const int64_t begin = part.channels.begin, end = part.channels.end;
  alignas(64) Lanes states[kSpanBlocks];
  for (int64_t d = begin, block = 0; part.is_first && d < end; d += 16, block++)
    load_state(args, part.number, d, states[block]);
  for (int64_t token = part.tokens.begin; token < part.tokens.end; token += kWalk) {
    const Span walk{token, smaller(token + kWalk, part.tokens.end)};
    with_count<kTaps>(static_cast<int>(args.taps()), [&](auto kCount) {
      for (int64_t d = begin, block = 0; d < end; d += 16, block++)
        convolve<kCount>(args, part, walk, d, span.taps[block], span.bias[block], states[block]);
    });
  }
  if (part.is_first)
    for (int64_t d = begin, block = 0; d < end; d += 16, block++) store_state(args, part, d, states[block]);
}

void run_causal_conv1d(const CausalConv1dArgs& args) {
  refuse_bad_lengths("causal_conv1d", args.cu_seqlens, "x", args.tokens());
  const int64_t sequences = args.sequences(), channels = args.channels();
  if (sequences == 0) return;
  const int threads = threads_worth(kTokenProducts * args.x.numel() + kStateProducts * sequences * channels);
  const int64_t wanted = ceil_div(4 * threads, sequences), tokens = args.batch() * args.tokens() / sequences;
  const int64_t parts = larger(1, smaller(wanted, tokens / (4 * kWalk)));  // the number of parts of a sequence's tokens
  const RowTiles spans(ceil_div(channels, 16), kSpanBlocks);
  parallel_for(sequences * parts * spans.count, threads, [&](int64_t task) {
    const int64_t number = task / spans.count / parts, part = task / spans.count % parts, span = task % spans.count;
    const Sequence sequence(args, number);
    const int64_t length = sequence.end - sequence.begin;
    run_span(args, {number,
                    sequence,
                    {sequence.begin + part * length / parts, sequence.begin + (part + 1) * length / parts},
                    {spans.begin(span) * 16, smaller(spans.begin(span + 1) * 16, channels)},
                    part == 0});
  });
}

constexpr Kernel<CausalConv1dArgs> kRows[] = {
    {LOWBIT_ROW("causal_conv1d"), never_refuses<CausalConv1dArgs>, run_causal_conv1d}};

}  // namespace

void recurrent_causal_conv1d_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
