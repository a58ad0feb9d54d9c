// SPDX-License-Identifier: Apache-2.0
// The heart: a kernel is a row {name, supports, run}; a backend is a struct of row spans, one span per op; a CPU ISA is just a backend.
// select() takes the first row that fits, or the one that the caller forces by name, and then fails loudly if it does not fit.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/isa.hpp"

namespace lowbit {

struct LinearArgs;
struct QuantizeArgs;
struct OptimArgs;
struct ScoreProgramArgs;
struct AttentionForwardArgs;
struct AttentionBackwardArgs;
struct DecodeArgs;
struct KvQuantizeArgs;
struct KvDequantizeArgs;

template <class Args>
struct Kernel {
  std::string_view name;                  // <op>_<what>_<target>: linear_int4_avx2
  std::string_view (*refuses)(const Args&);  // "" if the row can run these arguments, else the reason
  void (*run)(const Args&);
};

struct Backend {
  std::string_view name;
  Isa isa;
  std::span<const Kernel<LinearArgs>> linear;
  std::span<const Kernel<QuantizeArgs>> quantize;
  std::span<const Kernel<OptimArgs>> optim;
  std::span<const Kernel<ScoreProgramArgs>> score_program;
  std::span<const Kernel<AttentionForwardArgs>> attention_forward;
  std::span<const Kernel<AttentionBackwardArgs>> attention_backward;
  std::span<const Kernel<DecodeArgs>> decode;
  std::span<const Kernel<KvQuantizeArgs>> kv_quantize;
  std::span<const Kernel<KvDequantizeArgs>> kv_dequantize;
};

LOWBIT_API std::span<const Backend* const> backends();  // best first; defined once, in csrc/backends.cpp

// Which span of a backend serves the op with these arguments.
template <class Args> struct OpOf;
template <> struct OpOf<LinearArgs> {
  static constexpr std::string_view name = "linear";
  static auto rows(const Backend& backend) { return backend.linear; }
};
template <> struct OpOf<QuantizeArgs> {
  static constexpr std::string_view name = "quantize";
  static auto rows(const Backend& backend) { return backend.quantize; }
};
template <> struct OpOf<OptimArgs> {
  static constexpr std::string_view name = "optim";
  static auto rows(const Backend& backend) { return backend.optim; }
};
template <> struct OpOf<ScoreProgramArgs> {
  static constexpr std::string_view name = "score_program";
  static auto rows(const Backend& backend) { return backend.score_program; }
};
template <> struct OpOf<AttentionForwardArgs> {
  static constexpr std::string_view name = "attention_forward";
  static auto rows(const Backend& backend) { return backend.attention_forward; }
};
template <> struct OpOf<AttentionBackwardArgs> {
  static constexpr std::string_view name = "attention_backward";
  static auto rows(const Backend& backend) { return backend.attention_backward; }
};
template <> struct OpOf<DecodeArgs> {
  static constexpr std::string_view name = "decode";
  static auto rows(const Backend& backend) { return backend.decode; }
};
template <> struct OpOf<KvQuantizeArgs> {
  static constexpr std::string_view name = "kv_quantize";
  static auto rows(const Backend& backend) { return backend.kv_quantize; }
};
template <> struct OpOf<KvDequantizeArgs> {
  static constexpr std::string_view name = "kv_dequantize";
  static auto rows(const Backend& backend) { return backend.kv_dequantize; }
};

struct RowInfo {
  std::string name, isa;
  bool available;
  std::string reason;  // why not
};
LOWBIT_API std::vector<RowInfo> rows_of(std::string_view op);

// Forced row of this thread ("" = none), else of the process (LOWBIT_KERNEL). Both name a row of one op and leave the other ops alone.
LOWBIT_API std::string force_kernel(std::string name);  // returns the previous one; ValueError for an unknown name
LOWBIT_API std::string_view forced_kernel(std::string_view op);
LOWBIT_API std::string_view last_kernel(std::string_view op);  // the row that ran last on this thread
LOWBIT_API void note_ran(std::string_view op, std::string_view name);

LOWBIT_API std::string unavailable_reason(const Backend& backend);  // "" if this machine (and LOWBIT_ISA) can run it

struct Choice {
  std::string name;
  bool chosen;
  std::string reason;
};

template <class Args>
std::vector<Choice> explain(const Args& args) {
  const std::string_view forced = forced_kernel(OpOf<Args>::name);
  std::vector<Choice> choices;
  bool found = false;
  for (const Backend* backend : backends())
    for (const Kernel<Args>& row : OpOf<Args>::rows(*backend)) {
      std::string reason = unavailable_reason(*backend);
      if (reason.empty()) reason = row.refuses(args);
      if (reason.empty() && !forced.empty() && row.name != forced) reason = concat("the row ", forced, " is forced");
      if (reason.empty() && found) reason = "a better row fits";
      choices.push_back({std::string(row.name), reason.empty(), reason});
      found |= reason.empty();
    }
  return choices;
}

template <class Args>
const Kernel<Args>& select(const Args& args) {
  const std::string_view forced = forced_kernel(OpOf<Args>::name);
  const Isa isa = chosen_isa();
  for (const Backend* backend : backends()) {
    if (backend->isa > isa) continue;
    for (const Kernel<Args>& row : OpOf<Args>::rows(*backend))
      if ((forced.empty() || row.name == forced) && row.refuses(args).empty()) return row;
  }
  std::string message = concat(OpOf<Args>::name, ": no kernel row fits", forced.empty() ? "" : concat(" (forced: ", forced, ")"));
  for (const Choice& choice : explain(args))
    if (forced.empty() || choice.name == forced) message += concat("\n  ", choice.name, ": ", choice.reason);
  throw Error(ErrorKind::not_implemented, message);
}

template <class Args>
void run(const Args& args) {
  const Kernel<Args>& row = select(args);
  row.run(args);
  note_ran(OpOf<Args>::name, row.name);
}

}  // namespace lowbit
