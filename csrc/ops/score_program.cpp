// SPDX-License-Identifier: Apache-2.0
#include "ops/score_program.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {
namespace {

using enum ErrorKind;

ScoreProgramArgs tile_args(const ScoreCall& call, std::string_view op, int64_t b, int64_t h, int64_t q0, int64_t k0,
                           const TensorView& scores, const TensorView& gradient) {
  check(scores.rank == 2, value, op, ": scores must have shape [rows, cols], got ", shape_text(scores));
  check(scores.dtype == DType::float32 || scores.dtype == DType::float64, type, op,
        ": scores must be float32 or float64, got ", name_of(scores.dtype));
  check_contiguous(op, "scores", scores);
  check(scores.numel() < (int64_t{1} << 31), value, op, ": scores must have less than 2^31 elements, got ",
        scores.numel());
  const Place place = place_of(op, {{"scores", scores}, {"gradient", gradient}});
  check_on(place, op, "captured", &call);
  return {.place = place,
          .call = &call,
          .dtype = scores.dtype,
          .b = b,
          .h = h,
          .q0 = q0,
          .k0 = k0,
          .rows = static_cast<int>(scores.shape[0]),
          .cols = static_cast<int>(scores.shape[1]),
          .stride = scores.shape[1],
          .scores = scores.data,
          .gradient = gradient.data};
}

}  // namespace

void score_program_eval(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0, const TensorView& scores) {
  const ScoreProgramArgs args = tile_args(call, "score_program_eval", b, h, q0, k0, scores, {});
  if (scores.numel() > 0) run(args);
}

void score_program_backward(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0,
                            const TensorView& scores, const TensorView& gradient,
                            std::span<const TensorView> captured_gradients) {
  constexpr std::string_view op = "score_program_backward";
  ScoreProgramArgs args = tile_args(call, op, b, h, q0, k0, scores, gradient);
  check(!call.program().is_mask, value, op, ": code must be of a score_mod, got a mask");
  check(gradient.rank == 2 && gradient.shape == scores.shape && gradient.dtype == scores.dtype &&
            gradient.is_contiguous(),
        value, op, ": gradient must be contiguous, of the shape and dtype of scores ", shape_text(scores), ", got ",
        name_of(gradient.dtype), " ", shape_text(gradient));
  check(static_cast<int>(captured_gradients.size()) == call.captured_count(), value, op,
        ": captured_gradients must have one entry per captured tensor (", call.captured_count(), "), got ",
        captured_gradients.size());
  check_on(args.place, op, "captured_gradients", captured_gradients);
  std::vector<CapturedGradient> targets;
  for (int i = 0; i < call.captured_count(); i++) {
    const TensorView& target = captured_gradients[i];
    const TensorView& tensor = call.captured()[i];
    bool same = target.rank == tensor.rank && target.dtype == scores.dtype && target.is_contiguous();
    for (int dim = 0; dim < tensor.rank; dim++) same &= target.shape[dim] == tensor.shape[dim];
    check(!target || same, value, op, ": captured_gradients[", i, "] must be contiguous ", name_of(scores.dtype), " ",
          shape_text(tensor), ", got ", name_of(target.dtype), " ", shape_text(target));
    targets.push_back({.data = target.data});
  }
  args.captured_gradients = targets.data();
  if (scores.numel() > 0) run(args);
}

Call describe(const ScoreProgramArgs& args) {
  const int64_t bytes = int64_t{args.rows} * args.cols * static_cast<int64_t>(size_of(args.dtype));
  Call call{.read = args.gradient ? 2 * bytes : bytes, .written = bytes};
  call.add(args.dtype, {args.rows, args.cols});
  return call;
}

}  // namespace lowbit
