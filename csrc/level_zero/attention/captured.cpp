// SPDX-License-Identifier: Apache-2.0
#include "level_zero/attention/captured.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "level_zero/runtime/memory.hpp"

namespace lowbit::level_zero {
namespace {

// Work-groups that add to the same address wait for each other.
int64_t copies_of(int64_t count) { return count <= 1024 ? 64 : 1; }

// From the first element to the last: a mask's gradient has no strides along dimensions that the mask broadcasts.
int64_t elements_of(const TensorView& gradient) {
  int64_t last = 0;
  for (int d = 0; d < gradient.rank; d++) last += (gradient.shape[d] - 1) * gradient.stride[d];
  return gradient.numel() ? last + 1 : 0;
}

// Calls each(tensor, view) for the gradients that are wanted.
template <class Each>
void for_each_wanted(const AttentionBackwardArgs& args, Each each) {
  for (std::size_t i = 0; i < args.grad_captured.size(); i++)
    if (args.grad_captured[i]) each(static_cast<int>(i), args.grad_captured[i]);
  if (args.grad_mask) each(Sums::kOfMask, args.grad_mask);
}

double value_of(const SumWords* words, int64_t copies, int64_t stride, uint32_t largest, int bits) {
  uint64_t high = 0, low = 0, special = 0;
  for (int64_t copy = 0; copy < copies; copy++, words += stride)
    high += words->high, low += words->low, special |= words->special;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (special & kSumNan || special == (kSumInfinite | kSumMinusInfinite))
    return std::numeric_limits<double>::quiet_NaN();
  if (special) return special == kSumInfinite ? kInfinity : -kInfinity;
  const double scaled = static_cast<double>(static_cast<int64_t>(high)) +
                        std::ldexp(static_cast<double>(static_cast<int64_t>(low)), -bits);
  return std::ldexp(scaled, static_cast<int>(largest >> 23) - 126 - bits);
}

void store(void* to, DType dtype, int64_t at, double value) {
  switch (dtype) {
    case DType::float64: static_cast<double*>(to)[at] = value; break;
    case DType::float32: static_cast<float*>(to)[at] = static_cast<float>(value); break;
    case DType::bfloat16: static_cast<uint16_t*>(to)[at] = bfloat16_from_float(static_cast<float>(value)); break;
    default: static_cast<uint16_t*>(to)[at] = float16_from_float(static_cast<float>(value));
  }
}

}  // namespace

std::string_view CapturedGradients::refuses(const AttentionBackwardArgs& args) {
  return args.wants_captured() && args.grad_captured.size() > Sums::kOfMask ? "score_mod captures more than 16 tensors"
                                                                            : "";
}

int64_t CapturedGradients::bytes(const AttentionBackwardArgs& args) {
  int64_t all = 0;
  for_each_wanted(args, [&](int, const TensorView& gradient) {
    const int64_t count = elements_of(gradient);
    all += count * copies_of(count) * static_cast<int64_t>(sizeof(SumWords));
  });
  return all;
}

CapturedGradients::CapturedGradients(const AttentionBackwardArgs& args, const CallMods& mods, void* words)
    : args_(args), mods_(mods) {
  auto* next = static_cast<SumWords*>(words);
  for_each_wanted(args, [&](int tensor, const TensorView& gradient) {
    const int64_t count = elements_of(gradient), copies = copies_of(count);
    if (!count) return;
    gradients_.push_back({tensor, gradient, count});
    sums_.of[tensor] = {next, count, copies}, next += count * copies;
  });
  for (int d = 0; args.grad_mask && d < 4; d++) sums_.mask_stride[d] = args.grad_mask.stride[d];
  const AttentionForwardArgs& forward = args.forward;
  const double steps = forward.score_mod ? static_cast<double>(forward.score_mod->program().backward.steps.size()) : 1,
               adds = static_cast<double>(forward.batch() * forward.heads() * forward.q_length()) *
                      static_cast<double>(forward.kv_length()) * (steps + 1);  // max terms per element
  sums_.bits = 61 - (adds > 1 ? std::ilogb(adds) : 0);
}

void CapturedGradients::run(const AttentionCall& call, const char* kernel, int64_t groups) const {
  const Place& place = args_.place;
  int64_t most = 1;
  for (const Gradient& gradient : gradients_) most = larger(most, gradient.count * sums_.of[gradient.tensor].copies);
  const SumsCall sums{mods_.sums(), sums_};
  const Program &of_rows = program(place, "attention_rows"), &pass = mods_.program_of_sums("attention_captured");
  of_rows.launch(place, "sums_start", ceil_div(most, kAttentionThreads), kAttentionThreads, &sums, sizeof sums);
  if (groups) pass.launch(place, kernel, groups, kAttentionThreads, &call, sizeof call);
  of_rows.launch(place, "sums_add", 1, kAttentionThreads, &sums, sizeof sums);
  if (groups) pass.launch(place, kernel, groups, kAttentionThreads, &call, sizeof call);
  Sums found;
  copy(place.device, &found, mods_.sums(), sizeof found);
  for (const Gradient& gradient : gradients_) write(gradient, found);
}

void CapturedGradients::write(const Gradient& gradient, const Sums& found) const {
  const Sums::Of& of = sums_.of[gradient.tensor];
  std::vector<SumWords> words(static_cast<std::size_t>(of.count * of.copies));
  copy(args_.place.device, words.data(), of.words, words.size() * sizeof(SumWords));
  std::vector<char> made(static_cast<std::size_t>(of.count) * static_cast<std::size_t>(size_of(gradient.to.dtype)));
  for (int64_t i = 0; i < of.count; i++)
    store(made.data(), gradient.to.dtype, i,
          value_of(words.data() + i, of.copies, of.count, found.largest[gradient.tensor], sums_.bits));
  copy(args_.place.device, gradient.to.data, made.data(), made.size());
}

}  // namespace lowbit::level_zero
