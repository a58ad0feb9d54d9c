// SPDX-License-Identifier: Apache-2.0
#include "ops/kernel.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "core/once.hpp"
#include "core/parallel.hpp"

namespace lowbit {
namespace {

template <class Args, class Body>
void for_each_row_of(Body&& body) {
  for (const Backend* backend : backends())
    for (const auto& row : OpOf<Args>::rows(*backend)) body(OpOf<Args>::name, *backend, row.name);
}

template <class Body>
void for_each_row(Body&& body) {  // body(op, backend, row name)
#define LOWBIT_OP(op, Args) for_each_row_of<Args>(body);
  LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP
}

// A forced row and its op. The op is stored, as a name does not show it: "decode" is the op of decode_int8_avx2, but
// only a prefix of decode_state_float8_avx2.
struct Forced {
  std::string op, name;  // both empty: none
};

Forced forced_row(std::string name, std::string_view from) {
  if (name.empty()) return {};
  std::string_view op;
  for_each_row([&](std::string_view row_op, const Backend&, std::string_view row) {
    if (row == name) op = row_op;
  });
  if (!op.empty()) return {std::string(op), std::move(name)};
  std::string nearest;  // rows that share the longest prefix with the name; all ops have 800 rows
  std::size_t most = 1;
  for_each_row([&](std::string_view, const Backend&, std::string_view row) {
    const auto same = static_cast<std::size_t>(std::ranges::mismatch(row, name).in1 - row.begin());
    if (same > most) nearest.clear(), most = same;
    if (same == most) nearest += concat(nearest.empty() ? ", such as " : ", ", row);
  });
  throw Error(ErrorKind::value, concat(from, ": unknown kernel row, got '", name,
                                       "', wanted one that lowbit.kernels() lists", nearest));
}

const Forced& process_wide() {
  static std::atomic<const Forced*> kept{nullptr};
  return made_once(kept, [] {
    const char* value = std::getenv("LOWBIT_KERNEL");
    return forced_row(value ? value : "", "LOWBIT_KERNEL");
  });
}

thread_local Forced forced_here;

#define LOWBIT_OP(op, Args) +1
constexpr std::size_t kOps = LOWBIT_OPS(LOWBIT_OP);
#undef LOWBIT_OP

// The row that ran last, per op. Few ops: linear search.
struct LastRun {
  std::string_view op, name;
};
thread_local std::array<LastRun, kOps> last_runs;

LastRun& last_run(std::string_view op) {
  return *std::ranges::find_if(last_runs, [&](const LastRun& run) { return run.op.empty() || run.op == op; });
}

}  // namespace

#define LOWBIT_OP(op, Args)                                                      \
  void add_rows(Backend& backend, const Kernel<Args>* rows, std::size_t count) { \
    backend.op.insert(backend.op.end(), rows, rows + count);                     \
  }
LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP

void add_peak(Backend& backend, const Peak& peak) { backend.peaks.push_back(peak); }

PeakRate peak_rate(Arithmetic arithmetic, int threads, int repeats) {
  check(threads >= 1 && repeats >= 1, ErrorKind::value, "peak_rate: threads and repeats must be at least 1, got ",
        threads, " and ", repeats);
  constexpr int64_t kRounds = 200000;  // some milliseconds
  PeakRate best;
  for (const Backend* backend : backends()) {
    if (backend->peaks.empty() || backend->device != Device{}.type) continue;
    if (!backend->unavailable({}).empty()) continue;
    for (const Peak& peak : backend->peaks)
      for (int repeat = 0; peak.arithmetic == arithmetic && repeat < repeats; repeat++) {
        std::atomic<int64_t> operations{0};
        const auto begin = std::chrono::steady_clock::now();
        parallel(threads, [&](int) { operations += peak.run(kRounds); });
        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
        const double rate = static_cast<double>(operations.load()) / time.count();
        if (rate > best.operations_per_s) best = {peak.what, rate};
      }
  }
  return best;
}

bool has_backend(DeviceType device) {
  for (const Backend* backend : backends())
    if (backend->device == device && backend->unavailable({.type = device}).empty()) return true;
  return false;
}

std::vector<RowInfo> rows_of(std::string_view op) {
  std::vector<RowInfo> rows;
  for_each_row([&](std::string_view row_op, const Backend& backend, std::string_view name) {
    if (row_op != op) return;
    const std::string& reason = backend.unavailable({.type = backend.device});
    rows.push_back({std::string(name), std::string(backend.name),
                    std::string(name_of(backend.device)), reason.empty(), reason});
  });
  if (rows.empty()) {
    std::string ops;
    std::string_view previous;
    for_each_row([&](std::string_view row_op, const Backend&, std::string_view) {
      if (row_op != std::exchange(previous, row_op)) ops += concat(ops.empty() ? "" : ", ", row_op);
    });
    throw Error(ErrorKind::value, concat("kernels: op must be one of ", ops, ", got '", op, "'"));
  }
  return rows;
}

std::string force_kernel(std::string name) {
  return std::exchange(forced_here, forced_row(std::move(name), "force_kernel")).name;
}

std::string_view forced_kernel(std::string_view op) {
  const Forced& forced = forced_here.name.empty() ? process_wide() : forced_here;
  return forced.op == op ? std::string_view(forced.name) : std::string_view();
}

std::string_view last_kernel(std::string_view op) {
  const auto run = std::ranges::find(last_runs, op, &LastRun::op);
  return run == last_runs.end() ? std::string_view() : run->name;
}

void note_ran(std::string_view op, std::string_view name) { last_run(op) = {op, name}; }

}  // namespace lowbit
