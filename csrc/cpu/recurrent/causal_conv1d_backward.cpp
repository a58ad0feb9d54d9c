// SPDX-License-Identifier: Apache-2.0
// The row of the op causal_conv1d_backward. With p the sum before f, and g = grad_y f'(p):
//   grad_u[t] = sum_j weight[j] g[t + K - 1 - j],   grad_weight[j] = sum_t g[t] u[t - (K - 1) + j],
//   grad_bias = sum_t g[t]
// A task is some channels in all sequences, so that sums do not depend on threads. One pass over the tokens: a gradient
// of an input is complete K - 1 tokens later, and the K - 1 that are not yet are kept in between.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "cpu/gate_slopes.hpp"
#include "cpu/recurrent/convolution.hpp"
#include "cpu/recurrent/refused.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct Block {  // 16 channels
  int64_t channel;
  Lanes state, pending;     // the state of a sequence; the gradients of inputs that are not complete
  Lanes of_end, of_state;   // gradients of its last state and of its first
  Lanes of_weight;          // sums of all sequences
  float of_bias[16];
};

// Adds what the last state passes on to the gradient of an input, and stores that: of x, or of the state before it.
LOWBIT_INLINE void finish(const CausalConv1dBackwardArgs& args, const Sequence& sequence, const Rows& grad_x,
                          Block& block, int64_t token, f32x16 grad) {
  const int64_t kept = args.forward.kept(), column = token - (sequence.end - kept);
  if (column >= 0) grad = add(grad, load(block.of_end[column]));
  if (token >= sequence.begin) grad_x.store(token, grad);
  else store(block.of_state[kept + token - sequence.begin], grad);
}

template <int kCount>
void walk_back(const CausalConv1dBackwardArgs& args, const Sequence& sequence, Span tokens, const Lanes& taps,
               const float* bias, Block& block) {
  const CausalConv1dArgs& forward = args.forward;
  const Rows x(forward.x, sequence.batch, block.channel), grad_x(args.grad_x, sequence.batch, block.channel);
  const Rows grad_y(args.grad_y, sequence.batch, block.channel);
  f32x16 window[kCount], pending[kCount], of_weight[kCount], of_bias = set1(0.0f);
  unroll<kCount - 1>([&](auto i) {
    window[i] = input_at(x, sequence, block.state, forward.kept(), tokens.begin - (kCount - 1) + i);
    pending[i] = load(block.pending[i]);
  });
  unroll<kCount>([&](auto i) { of_weight[i] = set1(0.0f); });
  for (int64_t token = tokens.begin; token < tokens.end; token++) {
    window[kCount - 1] = x.load(token);
    f32x16 grad = grad_y.load(token);
    if (forward.silu) {
      f32x16 sum = load(bias);
      unroll<kCount>([&](auto i) { sum = fma(load(taps[i]), window[i], sum); });
      grad = mul(grad, silu_and_slope(sum).slope);
    }
    pending[kCount - 1] = set1(0.0f);
    of_bias = add(of_bias, grad);
    unroll<kCount>([&](auto i) {
      of_weight[i] = fma(grad, window[i], of_weight[i]);
      pending[i] = fma(load(taps[i]), grad, pending[i]);
    });
    finish(args, sequence, grad_x, block, token - (kCount - 1), pending[0]);
    unroll<kCount - 1>([&](auto i) { window[i] = window[i + 1], pending[i] = pending[i + 1]; });
  }
  unroll<kCount - 1>([&](auto i) { store(block.pending[i], pending[i]); });
  unroll<kCount>([&](auto i) { store(block.of_weight[i], add(load(block.of_weight[i]), of_weight[i])); });
  store(block.of_bias, add(load(block.of_bias), of_bias));
}

void begin_sequence(const CausalConv1dBackwardArgs& args, int64_t number, Block& block) {
  const TensorView& grad = args.grad_final_state;
  load_state(args.forward, number, block.channel, block.state);
  clear(block.pending), clear(block.of_end);
  if (grad)
    load_lanes(grad, number * grad.stride[0] + block.channel * grad.stride[1],
               args.forward.channels() - block.channel, args.forward.kept(), block.of_end);
}

// What is still pending; and columns of the state that no tap of the sequence reads.
void end_sequence(const CausalConv1dBackwardArgs& args, int64_t number, const Sequence& sequence, Block& block) {
  const CausalConv1dArgs& forward = args.forward;
  const Rows grad_x(args.grad_x, sequence.batch, block.channel);
  const int64_t taps = forward.taps(), kept = forward.kept();
  for (int64_t token = sequence.begin - kept; token < sequence.begin - (taps - 1); token++)
    finish(args, sequence, grad_x, block, token, set1(0.0f));
  for (int64_t i = 0; i < taps - 1; i++)
    finish(args, sequence, grad_x, block, sequence.end - (taps - 1) + i, load(block.pending[i]));
  store_lanes(args.grad_state, (number * forward.channels() + block.channel) * kept, forward.channels() - block.channel,
              kept, block.of_state);
}

void run_channels(const CausalConv1dBackwardArgs& args, Span channels) {
  const CausalConv1dArgs& forward = args.forward;
  const SpanTaps span(forward, channels);
  alignas(64) Block blocks[kSpanBlocks];
  const int64_t count = ceil_div(channels.count(), 16);
  for (int64_t i = 0; i < count; i++) {
    blocks[i].channel = channels.begin + i * 16;
    clear(blocks[i].of_weight), store(blocks[i].of_bias, set1(0.0f));
  }
  for (int64_t number = 0; number < forward.sequences(); number++) {
    const Sequence sequence(forward, number);
    for (int64_t i = 0; i < count; i++) begin_sequence(args, number, blocks[i]);
    for (int64_t token = sequence.begin; token < sequence.end; token += kWalk) {
      const Span walk{token, smaller(token + kWalk, sequence.end)};
      with_count<kTaps>(static_cast<int>(forward.taps()), [&](auto kCount) {
        for (int64_t i = 0; i < count; i++)
          walk_back<kCount>(args, sequence, walk, span.taps[i], span.bias[i], blocks[i]);
      });
    }
    for (int64_t i = 0; i < count; i++) end_sequence(args, number, sequence, blocks[i]);
  }
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = blocks[i].channel, left = forward.channels() - at;
    store_lanes(args.grad_weight, at * forward.taps(), left, forward.taps(), blocks[i].of_weight);
    store_from_float(args.grad_bias.data, args.grad_bias.dtype, at, left, load(blocks[i].of_bias));
  }
}

void run_causal_conv1d_backward(const CausalConv1dBackwardArgs& args) {
  const CausalConv1dArgs& forward = args.forward;
  refuse_bad_lengths("causal_conv1d_backward", forward.cu_seqlens, "x", forward.tokens());
  const int64_t channels = forward.channels();
  const RowTiles spans(ceil_div(channels, 16), kSpanBlocks);
  parallel_for(spans.count, threads_worth(2 * kTokenProducts * forward.x.numel()), [&](int64_t span) {
    run_channels(args, {spans.begin(span) * 16, smaller(spans.begin(span + 1) * 16, channels)});
  });
}

constexpr Kernel<CausalConv1dBackwardArgs> kRows[] = {
    {LOWBIT_ROW("causal_conv1d_backward"), never_refuses<CausalConv1dBackwardArgs>, run_causal_conv1d_backward}};

}  // namespace

void recurrent_causal_conv1d_backward_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
