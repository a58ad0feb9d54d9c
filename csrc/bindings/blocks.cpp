// SPDX-License-Identifier: Apache-2.0
#include "ops/blocks.hpp"

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"

namespace lowbit {
namespace {

// The tensors of a weight, kept alive during the call.
struct WeightArguments {
  TensorArgument codes, absmax, scale_codes, code_map, offset;

  BlockedWeight weight(int64_t numel, int64_t block_size) const {
    return {.numel = numel,
            .block_size = block_size,
            .codes = *codes,
            .absmax = *absmax,
            .scale_codes = *scale_codes,
            .code_map = *code_map,
            .offset = *offset};
  }
};

void blocks_linear_into(py::handle x, py::handle codes, py::handle absmax, int64_t format, int64_t block_size,
                        py::handle y, py::handle bias, py::handle scale_codes, py::handle code_map, py::handle offset) {
  const TensorArgument from(x, "blocks_linear: x"), to = output(y, "blocks_linear: y"),
                                                    added = optional(bias, "blocks_linear: bias");
  const WeightArguments weight{{codes, "blocks_linear: codes"},
                               {absmax, "blocks_linear: absmax"},
                               optional(scale_codes, "blocks_linear: scale_codes"),
                               optional(code_map, "blocks_linear: code_map"),
                               optional(offset, "blocks_linear: offset")};
  const py::gil_scoped_release nogil;
  blocks_linear({.weight = weight.weight(0, block_size), .x = *from, .bias = *added, .y = *to}, format);
}

void blocks_dequantize_into(py::handle codes, py::handle absmax, int64_t format, int64_t block_size, int64_t numel,
                            int64_t begin, py::handle out, py::handle scale_codes, py::handle code_map,
                            py::handle offset) {
  const TensorArgument to = output(out, "blocks_dequantize: out");
  const WeightArguments weight{{codes, "blocks_dequantize: codes"},
                               {absmax, "blocks_dequantize: absmax"},
                               optional(scale_codes, "blocks_dequantize: scale_codes"),
                               optional(code_map, "blocks_dequantize: code_map"),
                               optional(offset, "blocks_dequantize: offset")};
  const py::gil_scoped_release nogil;
  blocks_dequantize({.weight = weight.weight(numel, block_size), .begin = begin, .out = *to}, format);
}

void int8_linear_into(py::handle x, py::handle weight, py::handle row_scale, py::handle column_scale, py::handle y,
                      py::handle bias) {
  const TensorArgument from(x, "int8_linear: x"), by(weight, "int8_linear: weight"),
      row_scales(row_scale, "int8_linear: row_scale"), column_scales(column_scale, "int8_linear: column_scale"),
      added = optional(bias, "int8_linear: bias"), to = output(y, "int8_linear: y");
  const py::gil_scoped_release nogil;
  int8_linear({.x = *from,
               .weight = *by,
               .row_scale = *row_scales,
               .column_scale = *column_scales,
               .bias = *added,
               .y = *to});
}

}  // namespace

void register_blocks(py::module_& m) {
  using py::arg;
  m.def("blocks_linear", blocks_linear_into, arg("x"), arg("codes"), arg("absmax"), arg("format"), arg("block_size"),
        arg("y"), arg("bias") = py::none(), arg("scale_codes") = py::none(), arg("code_map") = py::none(),
        arg("offset") = py::none(),
        R"(Write ``x @ w.T + bias`` for a 4-bit weight as bitsandbytes keeps it; sums are float32, rounded once.

Args:
    x: ``[m, k]`` float32, bfloat16 or float16; k a multiple of 8.
    codes: uint8 ``[ceil(n * k / 2)]``, the first of two in the high nibble.
    absmax: float32 ``[ceil(n * k / block_size)]``; beside ``scale_codes``, one for 256 blocks.
    format: ``FORMATS``: nf4 or fp4.
    block_size: weights that share a scale, a power of two from 32 to 4096.
    y: ``[m, n]``, dtype of x, written.
    bias: ``[n]`` of one of the three dtypes.
    scale_codes, code_map, offset: uint8, one a block, float32 ``[256]``, one float32: a scale is
        ``code_map[scale_codes[block]] * absmax[block / 256] + offset``.

Raises:
    ValueError, TypeError: an argument does not fit; the text names it.)");
  m.def("blocks_dequantize", blocks_dequantize_into, arg("codes"), arg("absmax"), arg("format"), arg("block_size"),
        arg("numel"), arg("begin"), arg("out"), arg("scale_codes") = py::none(), arg("code_map") = py::none(),
        arg("offset") = py::none(),
        "Write weights ``begin`` (a multiple of 32) and following of the ``numel`` that a weight of ``blocks_linear`` "
        "has into ``out``, float32, bfloat16 or float16.");
  m.def("int8_linear", int8_linear_into, arg("x"), arg("weight"), arg("row_scale"), arg("column_scale"), arg("y"),
        arg("bias") = py::none(),
        R"(Write ``x @ weight.T * (row_scale * column_scale) / 127**2 + bias``, LLM.int8's product.

Args:
    x, weight: int8 ``[m, k]``, ``[n, k]``; the product is exact.
    row_scale, column_scale: float32 ``[m]``, ``[n]``: the largest absolute value of each row of x and weight.
    y: ``[m, n]`` float32, bfloat16 or float16, written.
    bias: ``[n]`` of one of the three dtypes.

Raises:
    ValueError, TypeError: an argument does not fit; the text names it.)");
}

}  // namespace lowbit
