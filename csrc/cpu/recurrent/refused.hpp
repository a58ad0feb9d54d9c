// SPDX-License-Identifier: Apache-2.0
// Errors of recurrent ops that depend on the data, found before their rows write anything. Compiled once, for all
// machines.
#pragma once

#include "cpu/packed_sequences.hpp"
#include "ops/gated_delta_rule.hpp"
#include "ops/selective_scan.hpp"
#include "ops/ssd.hpp"

namespace lowbit::cpu {

// Every g must be finite and, without A_log, at most 0; A_log and dt_bias must be finite; cu_seqlens must rise from 0
// to the number of tokens.
void refuse_bad_values(const GatedDeltaRuleArgs& args);

// dt, dt_bias and A must be finite, and A at most 0; cu_seqlens must rise from 0 to the number of tokens.
void refuse_bad_values(const SsdArgs& args);
void refuse_bad_values(const SelectiveScanArgs& args);

}  // namespace lowbit::cpu
