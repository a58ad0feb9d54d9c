// SPDX-License-Identifier: Apache-2.0
// What Python asks of the CUDA runtime itself; ops reach their kernels as on any device.
#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "bindings/tensor_caster.hpp"
#include "cuda/attention/kind.hpp"
#include "cuda/sources.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/library.hpp"
#include "ops/attention_mods.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;

py::list libraries() {
  py::list all;
  for (std::size_t i = 0; i < std::size(cuda::kLibraryNames); i++) {
    const cuda::Library& library = cuda::library(static_cast<cuda::LibraryName>(i));
    py::dict facts;
    facts["name"] = cuda::kLibraryNames[i], facts["path"] = library.path, facts["missing"] = library.missing;
    all.append(facts);
  }
  return all;
}

py::dict facts_of(const cuda::Source& source, const std::string& architecture) {
  cuda::Prebuilt made;
  {
    const py::gil_scoped_release nogil;
    made = cuda::prebuild(source, architecture);
  }
  py::dict facts;
  facts["name"] = source.name, facts["path"] = made.path, facts["log"] = made.log;
  return facts;
}

py::list prebuild(const std::string& architecture, std::string_view only, bool every_linear) {
  py::list all;
  for (const cuda::Source& source : every_linear ? cuda::linear_sources() : cuda::common_sources()) {
    if (!source.name.starts_with(only)) continue;
    all.append(facts_of(source, architecture));
  }
  return all;
}

using Code = std::vector<int64_t>;

py::list prebuild_attention(const std::string& architecture, const std::string& dtype, int e, int ev, const Code& score,
                            const py::list& score_captured, const Code& mask, const py::list& mask_captured) {
  const TensorArguments of_score(score_captured, "score_captured"), of_mask(mask_captured, "mask_captured");
  const AttentionMods mods("prebuild_attention", {score, of_score.views}, {mask, of_mask.views});
  const DType type = dtype == "float16" ? DType::float16 : DType::bfloat16;
  const cuda::AttentionKind kind{.dtype = type, .e = e, .ev = ev, .score = mods.score_mod(), .mask = mods.mask_mod()};
  py::list all;
  for (const auto kernel : {cuda::AttentionKernel::forward, cuda::AttentionKernel::backward,
                            cuda::AttentionKernel::captured})
    if (kernel != cuda::AttentionKernel::captured || kind.score)
      all.append(facts_of(cuda::attention_source(kind, kernel), architecture));
  return all;
}

}  // namespace

void register_cuda(py::module_& m) {
  py::module_ cuda = m.def_submodule("cuda", "NVIDIA's libraries and the code of devices.");
  cuda.def("look_in", cuda::look_in, py::arg("folders"),
           "Folders of Python packages whose nvidia/*/lib is searched; before the first call that opens a library.");
  cuda.def("libraries", libraries, "Open every library; return name, path and, if missing, where it was looked for.");
  cuda.def(
      "unavailable", [](int16_t index) { return cuda::unavailable({DeviceType::cuda, index}); }, py::arg("index"),
      "Why our kernels cannot run on this device; an empty string if they can.");
  cuda.def("prebuild", prebuild, py::arg("architecture"), py::arg("only") = "",
           py::arg("every_linear") = false,
           "Compile what optimizers and linear layers use most, or all of linear (where the name begins with `only`) "
           "into the cache, without a GPU; return name, path and NVRTC's log.");
  cuda.def("prebuild_attention", prebuild_attention, py::arg("architecture"), py::arg("dtype"), py::arg("e"),
           py::arg("ev"), py::arg("score_mod") = Code(), py::arg("score_captured") = py::list(),
           py::arg("mask_mod") = Code(), py::arg("mask_captured") = py::list(),
           "Likewise attention with these programs: forward, backward, gradients of what score_mod captured.");
}

}  // namespace lowbit
