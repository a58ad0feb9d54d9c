// SPDX-License-Identifier: Apache-2.0
#include "bindings/register.hpp"
#include "core/thread_count.hpp"
#include "onednn/matmul.hpp"

namespace lowbit {

void register_decode(pybind11::module_& m);
void register_score_tiles(pybind11::module_& m);
void register_prebuilt(pybind11::module_& m);

}  // namespace lowbit

PYBIND11_MODULE(internals, m) {
  lowbit::register_errors();
  lowbit::register_decode(m);
  lowbit::register_score_tiles(m);
  lowbit::register_prebuilt(m);
  m.def("kept_primitives", lowbit::onednn::kept_primitives, "How many primitives of oneDNN this thread keeps.");
  m.def("forget_crowded_cores", lowbit::forget_crowded_cores,
        "Let regions run as if no other process occupied the cores, until it is noticed again.");
  m.attr("MAX_KEPT") = lowbit::onednn::kMaxKept;
}
