// SPDX-License-Identifier: Apache-2.0
#include "bindings/register.hpp"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of lowbit. Tensors are torch CPU tensors or numpy arrays; outputs are written in place.";
  m.attr("version") = LOWBIT_VERSION;
  lowbit::register_errors();
  lowbit::register_linear(m);
  lowbit::register_quantize(m);
  lowbit::register_blocks(m);
  lowbit::register_optim(m);
  lowbit::register_score_program(m);
  lowbit::register_traced(m);
  lowbit::register_entries(m);
  lowbit::register_diagnostics(m);
  lowbit::register_cuda(m);
  lowbit::register_onednn(m);
  lowbit::register_recorder(m);
  lowbit::register_level_zero(m);
  lowbit::register_private_use(m);
  lowbit::register_simulated(m);
  lowbit::register_external(m);
}
