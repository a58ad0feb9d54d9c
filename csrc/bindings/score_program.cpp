// SPDX-License-Identifier: Apache-2.0
#include "ops/block_classes.hpp"

#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"
#include "score/print.hpp"

namespace lowbit {
namespace {

using Code = std::vector<int64_t>;

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

py::dict numbered_ops() {
  py::dict result;
  for (int op = 0; op < op_count(); op++) result[py::str(op_info(op).name)] = py::make_tuple(op, op_info(op).types);
  return result;
}

}  // namespace

void register_score_program(py::module_& m) {
  using py::arg;
  m.attr("SCORE_OPS") = numbered_ops();
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
}

}  // namespace lowbit
