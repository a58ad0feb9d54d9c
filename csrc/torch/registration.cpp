// SPDX-License-Identifier: Apache-2.0
#include "torch/registration.hpp"

#include <algorithm>
#include <map>
#include <mutex>

#include "core/error.hpp"
#include "torch/boxed.hpp"
#include "torch/ops.hpp"

namespace lowbit::torch {
namespace {

#define LOWBIT_OP(op) &op##_op,
const RegisteredOp* const kOps[] = {LOWBIT_TORCH_OPS(LOWBIT_OP)};
#undef LOWBIT_OP

constexpr const char* kFile = "lowbit/csrc/torch/registration.cpp";  // shown in torch's messages
// The version of the stable ABI whose stack conventions boxed.hpp follows: torch 2.10.
constexpr uint64_t kAbi = uint64_t{2} << 56 | uint64_t{10} << 48;

// Both libraries live as long as the process: torch's dispatcher keeps our function pointers.
struct Libraries {
  LibraryHandle definitions = nullptr, cpu = nullptr;
};

// Each op has a second entry, the overload `detached`, for callers that know that no gradient is wanted: autograd falls
// through it, while that of the first overload inspects the tensors in Python (python/lowbit/ops/derivatives.py).
std::string detached(const RegisteredOp& op) { return concat(op.name, ".detached"); }
std::string detached_schema(const RegisteredOp& op) { return concat(detached(op), op.schema + op.name.size()); }

bool register_kernel(const Symbols& torch, LibraryHandle library, const RegisteredOp& op) {
  for (const std::string& name : {std::string(op.name), detached(op)})
    if (torch.library_impl(library, name.c_str(), op.kernel, kAbi) != 0) return false;
  return true;
}

std::string register_op(const Symbols& torch, const Libraries& libraries, const RegisteredOp& op) {
  if (torch.library_def(libraries.definitions, op.schema) != 0 ||
      torch.library_def(libraries.definitions, detached_schema(op).c_str()) != 0)
    return "torch refused the schema (it wrote why to stderr)";
  return register_kernel(torch, libraries.cpu, op) ? "" : "torch refused the CPU kernel (it wrote why to stderr)";
}

std::mutex mutex;
std::vector<Registration> done;

}  // namespace

std::span<const RegisteredOp* const> all_ops() { return kOps; }

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const RegisteredOp* op : kOps) names.push_back(concat("lowbit::", op->name));
  return names;
}

const RegisteredOp& registered_op(std::string_view name) {
  for (const RegisteredOp* op : kOps)
    if (op->name == name) return *op;
  throw Error(ErrorKind::value, concat("op must be one that torch is given, got ", name));
}

std::vector<Registration> register_ops(const std::vector<std::string>& taken) {
  const std::lock_guard lock(mutex);
  if (!done.empty()) return done;

  std::string reason;
  const Symbols* torch = symbols(&reason);
  Libraries libraries;
  if (torch && (torch->library_init_fragment("lowbit", kFile, __LINE__, &libraries.definitions) != 0 ||
                torch->library_init_impl("lowbit", "CPU", kFile, __LINE__, &libraries.cpu) != 0)) {
    torch = nullptr;
    reason = "torch refused the namespace lowbit (it wrote why to stderr)";
  }
  std::vector<Registration> registrations;
  for (const RegisteredOp* op : kOps) {
    const std::string name = concat("lowbit::", op->name);
    if (torch && std::find(taken.begin(), taken.end(), name) != taken.end()) {
      registrations.push_back({name, "already registered", ""});
      continue;
    }
    const std::string problem = torch ? register_op(*torch, libraries, *op) : reason;
    registrations.push_back({name, problem.empty() ? "c++ shims" : "", problem});
  }
  if (torch) done = registrations;
  return registrations;
}

std::vector<std::string> register_key(const std::string& key) {
  static std::map<std::string, std::vector<std::string>> keys;
  const std::lock_guard lock(mutex);
  if (const auto known = keys.find(key); known != keys.end()) return known->second;
  std::vector<std::string> names;
  std::string reason;
  const Symbols* torch = symbols(&reason);
  LibraryHandle library = nullptr;
  if (!torch || done.empty() || torch->library_init_impl("lowbit", key.c_str(), kFile, __LINE__, &library) != 0)
    return names;
  for (std::size_t i = 0; i < done.size(); i++)
    if (done[i].how == "c++ shims" && register_kernel(*torch, library, *kOps[i])) names.push_back(done[i].op);
  look_at_devices();
  return keys[key] = names;
}

}  // namespace lowbit::torch
