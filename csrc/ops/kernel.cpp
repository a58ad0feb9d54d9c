// SPDX-License-Identifier: Apache-2.0
#include "ops/kernel.hpp"

#include <cstdlib>

#include "ops/linear.hpp"
#include "ops/quantize.hpp"

namespace lowbit {
namespace {

template <class Body>
void for_each_row(Body&& body) {  // body(op, backend, row name)
  for (const Backend* backend : backends()) {
    for (const auto& row : backend->linear) body(OpOf<LinearArgs>::name, *backend, row.name);
    for (const auto& row : backend->quantize) body(OpOf<QuantizeArgs>::name, *backend, row.name);
  }
}

bool names_a_row(std::string_view name) {
  bool found = false;
  for_each_row([&](std::string_view, const Backend&, std::string_view row) { found |= row == name; });
  return found;
}

void check_row(std::string_view name, std::string_view from) {
  if (name.empty() || names_a_row(name)) return;
  std::string rows;
  for_each_row([&](std::string_view, const Backend&, std::string_view row) { rows += concat(rows.empty() ? "" : ", ", row); });
  throw Error(ErrorKind::value, concat(from, ": unknown kernel row, got '", name, "', wanted one of ", rows));
}

const std::string& process_wide() {
  static const std::string name = [] {
    const char* value = std::getenv("LOWBIT_KERNEL");
    return std::string(value ? value : "");
  }();
  check_row(name, "LOWBIT_KERNEL");
  return name;
}

thread_local std::string forced_here;
thread_local std::string_view last_linear, last_quantize;

}  // namespace

std::string unavailable_reason(const Backend& backend) {
  if (backend.isa <= chosen_isa()) return "";
  if (backend.isa <= detected_isa()) return concat("LOWBIT_ISA lowers this machine to ", name_of(chosen_isa()));
  return concat("this machine has ", name_of(detected_isa()), " only");
}

std::vector<RowInfo> rows_of(std::string_view op) {
  std::vector<RowInfo> rows;
  for_each_row([&](std::string_view row_op, const Backend& backend, std::string_view name) {
    if (row_op != op) return;
    const std::string reason = unavailable_reason(backend);
    rows.push_back({std::string(name), std::string(backend.name), reason.empty(), reason});
  });
  check(!rows.empty(), ErrorKind::value, "kernels: op must be linear or quantize, got '", op, "'");
  return rows;
}

std::string force_kernel(std::string name) {
  check_row(name, "force_kernel");
  std::swap(name, forced_here);
  return name;
}

std::string_view forced_kernel(std::string_view op) {
  const std::string& name = forced_here.empty() ? process_wide() : forced_here;
  return name.size() > op.size() && name.compare(0, op.size(), op) == 0 ? std::string_view(name) : std::string_view();
}

std::string_view last_kernel(std::string_view op) { return op == OpOf<LinearArgs>::name ? last_linear : last_quantize; }

void note_ran(std::string_view op, std::string_view name) { (op == OpOf<LinearArgs>::name ? last_linear : last_quantize) = name; }

}  // namespace lowbit
