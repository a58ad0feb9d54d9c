// SPDX-License-Identifier: Apache-2.0
// Python functions for the CUDA runtime itself; ops reach their kernels as on any device.
#include <pybind11/stl.h>

#include "bindings/register.hpp"
#include "cuda/cudnn/library.hpp"
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

py::list prebuild(const std::string& architecture) {
  py::list all;
  for (const cuda::Source& source : cuda::common_sources(architecture)) {
    py::dict facts;
    facts["name"] = source.name, facts["path"] = cuda::prebuild(source, architecture).path;
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
  cuda.def("cudnn_missing", cuda::cudnn_missing, "Why no row is cuDNN's; an empty string if they are there.");
  cuda.def("prebuild", prebuild, py::arg("architecture"),
           "Compile the most used kernels of optimizers and linear layers into the cache; return name and path.");
}

}  // namespace lowbit
