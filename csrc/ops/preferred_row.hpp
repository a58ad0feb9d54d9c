// SPDX-License-Identifier: Apache-2.0
// The row preferred by a layer: taken if it accepts the call, else select() decides. A forced row (kernel.hpp) has
// precedence. The preference is an argument of the call, stored in the layer, rather than state of a thread.
//
// It is passed as a number, a hash of the row's name: an integer in a schema adds no cost per call. A program written
// by torch.export may run on builds and machines with other rows; there the number belongs to no row, or to one that
// refuses, and select() decides.
#pragma once

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include "core/once.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

// FNV-1a of the name, positive; 0 for the empty name: no preference.
constexpr int64_t row_number(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return name.empty() ? 0 : static_cast<int64_t>(hash >> 1);
}

// row_number of a row of the op, on any device; ValueError for an unknown name (lists the rows).
LOWBIT_API int64_t number_of_row(std::string_view op, std::string_view name);

// The row with this number if it accepts the call, else null.
template <class Args>
const Selected<Args>* preferred(const Args& args, int64_t number) {
  if (number == 0 || !forced_kernel(OpOf<Args>::name).empty()) return nullptr;
  struct Numbered {
    int64_t number;
    Selected<Args> selected;
  };
  static std::atomic<const std::vector<Numbered>*> kept{nullptr};
  const std::vector<Numbered>& all = made_once(kept, [] {
    std::vector<Numbered> rows;
    for (const Backend* backend : backends())
      for (const Kernel<Args>& row : OpOf<Args>::rows(*backend))
        rows.push_back({row_number(row.name), {*backend, row}});
    return rows;
  });
  const Device device = args.place.device;
  for (const auto& [its_number, selected] : all)
    if (its_number == number && selected.backend.device == device.type &&
        selected.backend.unavailable(device).empty() && selected.row.why_not(args).empty())
      return &selected;
  return nullptr;
}

template <class Args>
void run(const Args& args, int64_t number) {
  const Selected<Args>* const selected = preferred(args, number);
  run_selected(args, selected ? *selected : select(args));
}

template <class Args>
std::vector<Choice> explain(const Args& args, int64_t number) {
  std::vector<Choice> choices = explain(args);
  const Selected<Args>* const selected = preferred(args, number);
  if (!selected) return choices;
  for (Choice& choice : choices) {
    const bool fits = choice.chosen || choice.reason == kBetterFits;
    choice.chosen = choice.name == selected->row.name;
    if (choice.chosen) choice.reason.clear();
    else if (fits) choice.reason = concat("the layer prefers ", selected->row.name);
  }
  return choices;
}

}  // namespace lowbit
