// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace lowbit {

void register_linear(pybind11::module_& m);
void register_quantize(pybind11::module_& m);
void register_optim(pybind11::module_& m);
void register_score_program(pybind11::module_& m);
void register_decode(pybind11::module_& m);
void register_diagnostics(pybind11::module_& m);
void register_simulated(pybind11::module_& m);
void register_errors();

}  // namespace lowbit
