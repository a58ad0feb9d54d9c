// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

namespace lowbit {

// A C++ list of names as a Python dict: name to number.
template <std::size_t count>
pybind11::dict numbered(const std::string_view (&names)[count]) {
  pybind11::dict result;
  for (std::size_t i = 0; i < count; i++) result[pybind11::str(names[i])] = i;
  return result;
}

void register_linear(pybind11::module_& m);
void register_quantize(pybind11::module_& m);
void register_blocks(pybind11::module_& m);
void register_optim(pybind11::module_& m);
void register_score_program(pybind11::module_& m);
void register_traced(pybind11::module_& m);
void register_entries(pybind11::module_& m);
void register_diagnostics(pybind11::module_& m);
void register_cuda(pybind11::module_& m);
void register_onednn(pybind11::module_& m);
void register_recorder(pybind11::module_& m);
void register_level_zero(pybind11::module_& m);
void register_private_use(pybind11::module_& m);
void register_simulated(pybind11::module_& m);
void register_external(pybind11::module_& m);
void register_errors();

}  // namespace lowbit
