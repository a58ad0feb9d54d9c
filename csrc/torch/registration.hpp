// SPDX-License-Identifier: Apache-2.0
// Gives our ops to the dispatcher of the torch that is loaded in this process. Idempotent; may be called before torch
// is there.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "torch/ops.hpp"

namespace lowbit::torch {

struct Registration {
  std::string op;      // "lowbit::linear"
  std::string how;     // "c++ shims", "already registered" (by another copy of lowbit), or "": not registered
  std::string reason;  // why not
};

std::span<const RegisteredOp* const> all_ops();
std::vector<std::string> op_names();                       // "lowbit::linear", ...
const RegisteredOp& registered_op(std::string_view name);  // "linear"

// `taken` lists the names that the dispatcher knows already; asked for by the caller because torch has no C function
// for it.
std::vector<Registration> register_ops(const std::vector<std::string>& taken);

// Gives the ops that register_ops has registered to one more dispatch key ("PrivateUse1"), with the same kernels; their
// names. Idempotent.
std::vector<std::string> register_key(const std::string& key);

}  // namespace lowbit::torch
