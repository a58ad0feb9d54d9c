// SPDX-License-Identifier: Apache-2.0
// A score program over one tile, and programs as SPIR-V.
#include "ops/score_program.hpp"

#include <pybind11/stl.h>

#include <deque>

#include "bindings/tensor_caster.hpp"
#include "ops/checks.hpp"
#include "ops/place.hpp"
#include "score/spirv.hpp"

namespace lowbit {
namespace {

using Code = std::vector<int64_t>;
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

void score_program_eval(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0, const TensorView& scores) {
  const ScoreProgramArgs args = tile_args(call, "score_program_eval", b, h, q0, k0, scores, {});
  if (scores.numel() > 0) run(args);
}

// gradient [rows, cols] in place; captured_gradients[i] has the shape of captured tensor i and the dtype of scores,
// contiguous, or is not given.
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

void eval_into(const Code& code, const py::list& captured, int64_t b, int64_t h, int64_t q0, int64_t k0,
               py::handle scores) {
  const TensorArguments tensors(captured, "score_program_eval: captured");
  const TensorArgument scores_argument = output(scores, "score_program_eval: scores");
  const py::gil_scoped_release nogil;
  const ScoreCall call("score_program_eval", "code", code, tensors.views);
  score_program_eval(call, b, h, q0, k0, *scores_argument);
}

void program_backward_into(const Code& code, const py::list& captured, int64_t b, int64_t h, int64_t q0, int64_t k0,
                           py::handle scores, py::handle gradient, const py::list& captured_gradients) {
  const TensorArguments tensors(captured, "score_program_backward: captured");
  const TensorArguments gradients(captured_gradients, "score_program_backward: captured_gradients", Access::write,
                                    true);
  const TensorArgument scores_argument(scores, "score_program_backward: scores"),
      gradient_argument = output(gradient, "score_program_backward: gradient");
  const py::gil_scoped_release nogil;
  const ScoreCall call("score_program_backward", "code", code, tensors.views);
  score_program_backward(call, b, h, q0, k0, *scores_argument, *gradient_argument, gradients.views);
}

// Of tuples (name, code, captured, gradient).
py::bytes programs_spirv(const py::list& functions, bool sums) {
  std::deque<TensorArguments> tensors;
  std::deque<ScoreCall> calls;
  std::vector<ScoreFunction> wanted;
  for (const py::handle each : functions) {
    const auto [name, code, captured, gradient] = py::cast<std::tuple<std::string, Code, py::list, bool>>(each);
    tensors.emplace_back(captured, "score_programs_spirv: captured");
    calls.emplace_back("score_programs_spirv", "code", code, tensors.back().views);
    check(!gradient || !calls.back().program().is_mask, ErrorKind::value,
          "score_programs_spirv: gradient must be False of a mask, got True for ", name);
    wanted.push_back({&calls.back(), gradient, name});
  }
  const std::vector<uint32_t> words = score_spirv(wanted, sums);
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint32_t)};
}

}  // namespace

void register_score_tiles(py::module_& m) {
  using py::arg;
  m.def("score_program_eval", eval_into, arg("code"), arg("captured"), arg("b"), arg("h"), arg("q0"), arg("k0"),
        arg("scores"),
        "Run a program over float32 or float64 ``scores [rows, cols]``, of which the first is query q0 and key k0: "
        "they become the modified scores, for a mask the score or -inf.");
  m.def(
      "score_program_backward", program_backward_into, arg("code"), arg("captured"), arg("b"), arg("h"), arg("q0"),
      arg("k0"), arg("scores"), arg("gradient"), arg("captured_gradients"),
      "``gradient``, of the modified scores, becomes that of the raw ``scores``. ``captured_gradients`` has for each "
      "captured tensor None, or a tensor of its shape and the dtype of ``scores`` that its gradient is added to.");
  m.def("score_programs_spirv", programs_spirv, arg("functions"), arg("sums") = false,
        "Return a module of SPIR-V that exports functions of programs (csrc/score/spirv.hpp): tuples of exported name, "
        "code, captured tensors, whether of the gradient. sums: it adds up gradients of captured tensors.");
}

}  // namespace lowbit
