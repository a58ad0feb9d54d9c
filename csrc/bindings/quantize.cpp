// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"
#include "ops/linear.hpp"

namespace lowbit {
namespace {

py::tuple quantize_into(py::handle weight, py::handle packed, int64_t format, int64_t group_size, bool asymmetric,
                        int64_t mapping, int64_t scale, py::handle importance) {
  const TensorArgument from(weight, "quantize: weight"), weights = optional(importance, "quantize: importance");
  const TensorArgument to = output(packed, "quantize: packed");
  check((*from).rank == 2, ErrorKind::value, "quantize: weight must have shape [n, k], got ", shape_text(*from));
  const Distortion distortion = [&] {
    const py::gil_scoped_release nogil;
    return quantize(*from, *to,
                    weight_spec("quantize", (*from).size(0), (*from).size(1), format, group_size, asymmetric), mapping,
                    scale, *weights);
  }();
  return py::make_tuple(distortion.signal, distortion.noise, distortion.absmax_noise);
}

void repack_into(py::handle packed, int64_t layout_, py::handle out, int64_t out_layout, int64_t n, int64_t k,
                 int64_t format, int64_t group_size, bool asymmetric) {
  const TensorArgument from(packed, "repack: packed"), to = output(out, "repack: out");
  const py::gil_scoped_release nogil;
  repack({.spec = weight_spec("repack", n, k, format, group_size, asymmetric),
          .layout = layout("repack", layout_),
          .out_layout = layout("repack", out_layout),
          .packed = *from,
          .out = *to});
}

void pack_mxfp4_into(py::handle codes, py::handle scales, bool halves, py::handle out) {
  const TensorArgument from(codes, "pack_mxfp4: codes"), of(scales, "pack_mxfp4: scales"),
      to = output(out, "pack_mxfp4: out");
  const py::gil_scoped_release nogil;
  pack_mxfp4({.codes = *from, .scales = *of, .halves = halves}, *to);
}

void pack_gguf_into(py::handle blocks, int64_t type, py::handle places, py::handle out) {
  const TensorArgument from(blocks, "pack_gguf: blocks"), order = optional(places, "pack_gguf: places"),
      to = output(out, "pack_gguf: out");
  const py::gil_scoped_release nogil;
  pack_gguf(*from, type, *order, *to);
}

py::dict facts_of_gguf_types() {
  py::dict facts;
  for (std::size_t i = 0; i < std::size(kGgufTypeNames); i++) {
    const WeightSpec spec = gguf_spec(static_cast<GgufType>(i), 0, 0);
    py::dict fact;
    fact["number"] = i, fact["format"] = kFormatNames[static_cast<int>(spec.format)];
    fact["group_size"] = spec.group_size, fact["asymmetric"] = spec.asymmetric;
    with_gguf_type(static_cast<GgufType>(i), [&]<class Type>() {
      fact["weights"] = Type::weights, fact["products"] = Type::products;
    });
    facts[py::str(kGgufTypeNames[i])] = fact;
  }
  return facts;
}

bool is_all_finite(py::handle tensor) {
  const TensorArgument argument(tensor, "all_finite: tensor");
  const py::gil_scoped_release nogil;
  return all_finite(*argument);
}

py::tuple shape_of_packed(int64_t layout_, int64_t n, int64_t k, int64_t format, int64_t group_size, bool asymmetric) {
  const Sections shape = sections(layout("packed_shape", layout_),
                                  weight_spec("packed_shape", n, k, format, group_size, asymmetric));
  return py::make_tuple(shape.rows, shape.row_bytes);
}

py::dict facts_of_formats() {
  py::dict facts;
  for (std::size_t i = 0; i < std::size(kFormatNames); i++) {
    const Format format = static_cast<Format>(i);
    py::dict fact;
    fact["bits"] = bits(format), fact["kind"] = kCodecKindNames[static_cast<int>(kind_of(format))];
    fact["zero"] = symmetric_zero(format), fact["code_max"] = code_max(format);
    fact["smallest_group"] = smallest_group(format);
    py::list x_formats;
    for (std::size_t x = 0; x < std::size(kXFormatNames); x++)
      if (goes_with(static_cast<XFormat>(x), format)) x_formats.append(kXFormatNames[x]);
    fact["x_formats"] = py::tuple(x_formats);
    facts[py::str(kFormatNames[i])] = fact;
  }
  return facts;
}

}  // namespace

void register_quantize(py::module_& m) {
  using py::arg;
  m.attr("FORMATS") = numbered(kFormatNames);
  m.attr("FORMAT_FACTS") = facts_of_formats();
  m.attr("GGUF_TYPES") = facts_of_gguf_types();
  m.attr("MAPPINGS") = numbered(kMappingNames);
  m.attr("SCALE_CHOICES") = numbered(kScaleChoiceNames);
  m.attr("LAYOUTS") = numbered(kLayoutNames);
  m.attr("LAYOUT") = kLayoutNames[static_cast<int>(kKernelLayout)];
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  m.def("packed_shape", shape_of_packed, arg("layout"), arg("n"), arg("k"), arg("format"), arg("group_size"),
        arg("asymmetric"), "Return the shape of the uint8 matrix that a weight is in this layout (``LAYOUTS``).");
  m.def("quantize", quantize_into, arg("weight"), arg("packed"), arg("format"), arg("group_size"), arg("asymmetric"),
        arg("mapping"), arg("scale") = 0, arg("importance") = py::none(),
        R"(Quantize ``weight`` into ``packed``.

Args:
    weight: ``[n, k]`` float32, bfloat16 or float16, contiguous and finite.
    packed: uint8 of the ``packed_shape`` of ``LAYOUT``, written.
    format, group_size, asymmetric: ``FORMATS``; scales per ``group_size`` weights along k, 0 for per channel.
    mapping: how the range of a group becomes its scale (``MAPPINGS``).
    scale: ``SCALE_CHOICES``. absmax: that scale; search: the one with the least error among it and others.
    importance: float32 ``[k]``, finite and not negative: what a squared error at each k counts in a search.

Returns:
    (signal, noise, absmax_noise): the sums of squares of the weight, of its error, and of what that is with absmax;
    weighted by importance over a power of two, if given.)");
  m.def("repack", repack_into, arg("packed"), arg("layout"), arg("out"), arg("out_layout"), arg("n"), arg("k"),
        arg("format"), arg("group_size"), arg("asymmetric"),
        "Write a packed weight in another layout; codes, scales and zero points keep every bit.");
  m.def("pack_mxfp4", pack_mxfp4_into, arg("codes"), arg("scales"), arg("halves"), arg("out"),
        R"(Write blocks of MXFP4 as a packed weight [n, k] of fp4_e2m1 in groups of 32.

Args:
    codes: uint8 ``[n, k / 32, 16]``, two codes in a byte; rows and blocks may lie apart.
    scales: uint8 ``[n, k / 32]``, the exponents of powers of two, plus 127; likewise.
    halves: whether the low nibbles of a block are its first half, as in GGUF; else two neighbours share a byte.
    out: uint8 in the shape of the packed weight in the layout of the kernels, contiguous: written.

Raises:
    ValueError: a scale is 255 (nan), or a shape differs.)");
  m.def("pack_gguf", pack_gguf_into, arg("blocks"), arg("type"), arg("places"), arg("out"),
        R"(Write blocks of GGUF as a packed weight [n, k] in the format of their type.

Args:
    blocks: uint8 ``[n, k / weights of a block, bytes of a block]``; rows and blocks may lie apart.
    type: the ``number`` of the type in ``GGUF_TYPES``.
    places: int32 ``[groups]``: the group of the weight that each group of a row becomes; None for the same.
    out: uint8 in the shape of the packed weight in the layout of the kernels, contiguous: written.

Raises:
    ValueError: a scale or a minimum is inf or nan, the scales of a row differ by more than 2^24, or a shape differs.)");
  m.def("all_finite", is_all_finite, arg("tensor"),
        "Return True if a float32, bfloat16 or float16 tensor has no inf and no nan.");
}

}  // namespace lowbit
