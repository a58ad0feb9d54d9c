// SPDX-License-Identifier: Apache-2.0
// Registers our ops with the dispatcher of the torch loaded in this process. Idempotent; may be called before
// torch is loaded.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "torch/ops.hpp"

namespace lowbit::torch {

struct Registration {
  std::string op;      // "lowbit::linear"
  std::string how;     // "c++ shims", "already registered" (by another copy of lowbit), or "": not registered
  std::string reason;  // why the op is not registered
};

std::span<const RegisteredOp* const> all_ops();
std::vector<std::string> op_names();                       // "lowbit::linear", ...
const RegisteredOp& registered_op(std::string_view name);  // "linear"

// `taken` lists the names that the dispatcher already knows; the caller provides it because torch has no C
// function for that.
std::vector<Registration> register_ops(const std::vector<std::string>& taken);

// Registers the kernels of register_ops for one more dispatch key ("PrivateUse1"); returns the ops' names. Idempotent.
std::vector<std::string> register_key(const std::string& key);

}  // namespace lowbit::torch
