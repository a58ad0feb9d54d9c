// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sources.hpp"

namespace lowbit::cuda {

Source pairs_source();                          // for all experts
Source experts_source(const LinearKind& kind);  // the products
Source ends_source(const LinearKind& kind);     // independent of rows and parts
void add_experts_sources(std::vector<Source>& all, LinearKind kind);  // from the rows of the kind on

}  // namespace lowbit::cuda
