// SPDX-License-Identifier: Apache-2.0
#include "ops/score_program.hpp"

#include <pybind11/stl.h>

#include <deque>

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"
#include "ops/block_classes.hpp"
#include "score/print.hpp"
#include "score/spirv.hpp"

namespace lowbit {
namespace {

using Code = std::vector<int64_t>;

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

int64_t block_classes_into(const Code& code, const py::list& captured, int64_t batch, int64_t heads, int64_t q_length,
                           int64_t kv_length, int64_t q_block, int64_t kv_block, py::handle classes) {
  const TensorArguments tensors(captured, "block_classes: captured");
  const TensorArgument classes_argument = output(classes, "block_classes: classes");
  const py::gil_scoped_release nogil;
  const ScoreCall call("block_classes", "mask_mod", code, tensors.views);
  return block_classes(call, {batch, heads, q_length, kv_length, q_block, kv_block}, *classes_argument);
}

py::dict explain_program(const Code& code) {
  const auto program = score_program(code);
  py::dict result;
  result["is_mask"] = program->is_mask;
  result["forward"] = plan_text(program->forward);
  result["backward"] = plan_text(program->backward);
  return result;
}

std::string program_source(const Code& code, const py::list& captured, std::string_view language) {
  const TensorArguments tensors(captured, "score_program_source: captured");
  const ScoreCall call("score_program_source", "code", code, tensors.views);
  check(language == "cuda" || language == "opencl", ErrorKind::value,
        "score_program_source: language must be cuda or opencl, got ", language);
  const SourceLanguage in = language == "cuda" ? SourceLanguage::cuda : SourceLanguage::opencl;
  std::string source = score_source_prelude(in) + score_source(call, in, false);
  if (!call.program().is_mask) source += score_source(call, in, true);
  return source;
}

// Of tuples (name, code, captured, gradient).
py::bytes programs_spirv(const py::list& functions) {
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
  const std::vector<uint32_t> words = score_spirv(wanted);
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint32_t)};
}

py::dict numbered_ops() {
  py::dict result;
  for (int op = 0; op < op_count(); op++) result[py::str(op_info(op).name)] = py::make_tuple(op, op_info(op).types);
  return result;
}

}  // namespace

void register_score_program(py::module_& m) {
  using py::arg;
  m.attr("SCORE_OPS") = numbered_ops();
  m.def("score_program_eval", eval_into, arg("code"), arg("captured"), arg("b"), arg("h"), arg("q0"), arg("k0"),
        arg("scores"),
        R"(Run a score program over one tile: ``scores`` becomes the modified scores, for a mask the score or -inf.

Args:
    code: the program (lowbit.score.program).
    captured: its captured tensors.
    b, h: batch and query head of the tile.
    q0, k0: query and key of ``scores[0, 0]``.
    scores: float32 or float64 ``[rows, cols]``, contiguous, written.

Raises:
    ValueError, TypeError: the code or a tensor does not fit; the text says where.
    IndexError: a gather is out of range.)");
  m.def(
      "score_program_backward", program_backward_into, arg("code"), arg("captured"), arg("b"), arg("h"), arg("q0"),
      arg("k0"), arg("scores"), arg("gradient"), arg("captured_gradients"),
      R"(Differentiate a score program over one tile: ``gradient``, of the modified scores, becomes that of the raw
``scores``.

``captured_gradients`` has per captured tensor None, or a contiguous tensor of its shape and the dtype of
``scores`` that its gradient is added to.)");
  m.def(
      "block_classes", block_classes_into, arg("code"), arg("captured"), arg("B"), arg("H"), arg("q_len"),
      arg("kv_len"), arg("q_block"), arg("kv_block"), arg("classes"),
      R"(Write which blocks of a mask are empty (0), partial (1) or full (2) into ``classes``, uint8
``[B, H, q blocks, kv blocks]``.

A block that reaches over the end of q or k is never full. Returns how many blocks interval arithmetic
left to be evaluated.)");
  m.def("score_program_explain", explain_program, arg("code"),
        "Return the steps that a program runs as, forward and backward, and whether it is a mask.");
  m.def("score_program_source", program_source, arg("code"), arg("captured"), arg("language"),
        R"(Return a program as device functions in CUDA C (``"cuda"``) or OpenCL C (``"opencl"``): csrc/score/print.hpp.

Of ``captured`` the dtypes are read.)");
  m.def("score_programs_spirv", programs_spirv, arg("functions"),
        R"(Return a module of SPIR-V 1.2 that exports functions of programs: csrc/score/spirv.hpp.

``functions`` has tuples (exported name, code, captured tensors, whether of the gradient).)");
}

}  // namespace lowbit
