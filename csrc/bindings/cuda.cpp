// SPDX-License-Identifier: Apache-2.0
// What Python asks of the CUDA runtime itself; ops reach their kernels as on any device.
#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "cuda/sources.hpp"
#include "cuda/runtime/driver.hpp"
#include "cuda/runtime/libraries.hpp"

namespace lowbit {
namespace {

namespace py = pybind11;

py::list libraries() {
  py::list all;
  for (std::size_t i = 0; i < std::size(cuda::kLibraryNames); i++) {
    const Library& library = cuda::library(static_cast<cuda::LibraryName>(i));
    py::dict facts;
    facts["name"] = cuda::kLibraryNames[i], facts["path"] = library.path, facts["missing"] = library.missing;
    all.append(facts);
  }
  return all;
}

py::list prebuild(const std::string& architecture, std::string_view only, bool every_linear) {
  py::list all;
  for (const cuda::Source& source : every_linear ? cuda::linear_sources() : cuda::common_sources()) {
    if (!source.name.starts_with(only)) continue;
    cuda::Prebuilt made;
    {
      const py::gil_scoped_release nogil;
      made = cuda::prebuild(source, architecture);
    }
    py::dict facts;
    facts["name"] = source.name, facts["path"] = made.path, facts["log"] = made.log;
    all.append(facts);
  }
  return all;
}

}  // namespace

void register_cuda(py::module_& m) {
  py::module_ cuda = m.def_submodule("cuda", "NVIDIA's libraries and the code of devices.");
  cuda.def("libraries", libraries, "Open every library; return name, path and, if missing, where it was looked for.");
  cuda.def(
      "unavailable", [](int16_t index) { return cuda::unavailable({DeviceType::cuda, index}); }, py::arg("index"),
      "Why our kernels cannot run on this device; an empty string if they can.");
  cuda.def("prebuild", prebuild, py::arg("architecture"), py::arg("only") = "",
           py::arg("every_linear") = false,
           "Compile what optimizers and linear layers use most, or all of linear (where the name begins with `only`) "
           "into the cache, without a GPU; return name, path and NVRTC's log.");
}

}  // namespace lowbit
