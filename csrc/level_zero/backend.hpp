// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::level_zero {

// Intel GPUs, as torch's device xpu and as our own, lowbit_ze. Listing them loads nothing: the loader is opened by the
// first call with a tensor on such a device.
std::span<const Backend* const> backends();

void add_attention_rows(Backend& backend);
void add_decode_rows(Backend& backend);
void add_linear_rows(Backend& backend);
void add_optim_rows(Backend& backend);
void add_pack_rows(Backend& backend);
void add_quantize_rows(Backend& backend);

}  // namespace lowbit::level_zero
