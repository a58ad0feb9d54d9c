// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::onednn {

// oneDNN on the CPU, where its library is there. Asking for the backend opens nothing: the library is opened when
// somebody asks whether it is available, which nobody does who takes a row that stands before these.
std::span<const Backend* const> backends();

void add_attention_rows(Backend& backend);
void add_linear_rows(Backend& backend);

}  // namespace lowbit::onednn
