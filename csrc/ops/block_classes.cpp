// SPDX-License-Identifier: Apache-2.0
#include "ops/block_classes.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

int64_t block_classes(const ScoreCall& call, const BlockGrid& grid, const TensorView& classes) {
  constexpr std::string_view op = "block_classes";
  check(call.program().is_mask, value, op, ": code must be of a mask_mod, got a score_mod");
  check(grid.batch >= 1 && grid.heads >= 1, value, op, ": B and H must be at least 1, got ", grid.batch,
        " and ", grid.heads);
  constexpr int64_t kMaxLength = INT32_MAX;
  for (const auto& [length, name] : {std::pair{grid.q_length, "q_len"}, std::pair{grid.kv_length, "kv_len"}})
    check(length >= 0 && length <= kMaxLength, value, op, ": ", name, " must be 0..", kMaxLength, ", got ",
          length);
  check(grid.q_block >= 1 && grid.kv_block >= 1, value, op, ": block sizes must be at least 1, got ",
        grid.q_block, " and ", grid.kv_block);
  const int64_t rows = ceil_div(grid.q_length, grid.q_block), columns = ceil_div(grid.kv_length, grid.kv_block);
  check_tensor(op, "classes", classes, DType::uint8, {grid.batch, grid.heads, rows, columns});
  const Place place = place_of(op, {{"classes", classes}});
  check_on(place, op, "captured", &call);
  if (classes.numel() == 0) return 0;
  int64_t evaluated = 0;
  run(BlockClassesArgs{.place = place, .call = &call, .grid = grid, .classes = classes, .evaluated = &evaluated});
  return evaluated;
}

Call describe(const BlockClassesArgs& args) {
  return Call{.written = bytes_of(args.classes)}.with(args.classes);
}

}  // namespace lowbit
