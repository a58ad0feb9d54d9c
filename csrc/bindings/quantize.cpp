// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"
#include "ops/linear.hpp"

namespace lowbit {
namespace {

py::tuple quantize_into(py::handle weight, py::handle packed, int64_t format, int64_t group_size, bool asymmetric,
                        int64_t mapping) {
  const TensorArgument from(weight, "quantize: weight");
  const TensorArgument to = output(packed, "quantize: packed");
  check((*from).rank == 2, ErrorKind::value, "quantize: weight must have shape [n, k], got ", shape_text(*from));
  const Distortion distortion = [&] {
    const py::gil_scoped_release nogil;
    return quantize(*from, *to,
                    weight_spec("quantize", (*from).size(0), (*from).size(1), format, group_size, asymmetric), mapping);
  }();
  return py::make_tuple(distortion.signal, distortion.noise);
}

void pack_into(py::handle codes, py::handle scale, py::handle zero, py::handle packed, int64_t n, int64_t k,
               int64_t format, int64_t group_size, bool asymmetric) {
  const TensorArgument codes_argument(codes, "pack: codes"), scale_argument(scale, "pack: scale");
  const TensorArgument zero_argument = optional(zero, "pack: zero"), packed_argument = output(packed, "pack: packed");
  const py::gil_scoped_release nogil;
  pack({.spec = weight_spec("pack", n, k, format, group_size, asymmetric),
        .codes = *codes_argument,
        .scale = *scale_argument,
        .zero = *zero_argument,
        .packed = *packed_argument});
}

void unpack_into(py::handle packed, int64_t n, int64_t k, int64_t format, int64_t group_size, bool asymmetric,
                 py::handle codes, py::handle scale, py::handle zero) {
  const TensorArgument packed_argument(packed, "unpack: packed"), codes_argument = output(codes, "unpack: codes");
  const TensorArgument scale_argument = output(scale, "unpack: scale");
  const TensorArgument zero_argument(zero, "unpack: zero", Access::write, true);
  const py::gil_scoped_release nogil;
  unpack({.spec = weight_spec("unpack", n, k, format, group_size, asymmetric),
          .packed = *packed_argument,
          .codes = *codes_argument,
          .scale = *scale_argument,
          .zero = *zero_argument});
}

bool is_all_finite(py::handle tensor) {
  const TensorArgument argument(tensor, "all_finite: tensor");
  const py::gil_scoped_release nogil;
  return all_finite(*argument);
}

int64_t panel_bytes(int64_t format, int64_t k, int64_t group_size, bool asymmetric) {
  return weight_spec("panel_bytes", kPanelColumns, k, format, group_size, asymmetric).panel_bytes();
}

}  // namespace

void register_quantize(py::module_& m) {
  using py::arg;
  m.def("panel_bytes", panel_bytes, arg("format"), arg("k"), arg("group_size"), arg("asymmetric"),
        "Return the bytes of one panel: 16 columns of a packed weight over all ``k``.");
  m.def("quantize", quantize_into, arg("weight"), arg("packed"), arg("format"), arg("group_size"), arg("asymmetric"),
        arg("mapping"),
        R"(Quantize ``weight`` into ``packed``.

Args:
    weight: ``[n, k]`` float32, bfloat16 or float16, contiguous and finite.
    packed: uint8 ``[ceil(n / 16), panel_bytes]``, written.
    format, group_size, asymmetric: ``FORMATS``; scales per ``group_size`` weights along k, 0 for per channel.
    mapping: how scales are chosen (``MAPPINGS``).

Returns:
    (signal, noise): the sums of squares of the weight and of its error.)");
  m.def(
      "pack", pack_into, arg("codes"), arg("scale"), arg("zero"), arg("packed"), arg("n"), arg("k"), arg("format"),
      arg("group_size"), arg("asymmetric"),
      R"(Write row-major codes uint8 ``[n, k]``, scales and zero points float32 ``[n, groups]`` into
``packed``. ``zero`` is None for a
symmetric weight (its codes are unsigned: 128 means zero in int8, 8 in int4).)");
  m.def("unpack", unpack_into, arg("packed"), arg("n"), arg("k"), arg("format"), arg("group_size"), arg("asymmetric"),
        arg("codes"), arg("scale"), arg("zero"),
        "Write the codes, scales and zero points (None for a symmetric weight) of ``packed``; inverse of pack.");
  m.def("all_finite", is_all_finite, arg("tensor"),
        "Return True if a float32, bfloat16 or float16 tensor has no inf and no nan.");
}

}  // namespace lowbit
