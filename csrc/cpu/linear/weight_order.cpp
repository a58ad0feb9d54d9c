// SPDX-License-Identifier: Apache-2.0
#include "cpu/linear/weight_order.hpp"

#include <algorithm>

namespace lowbit::cpu {
namespace {

// A counting sort of rows first .. first + rows of index. each: index rows per row of x. refuse(row, e) raises, or
// returns for rows to be skipped.
template <class Index, class Refuse>
void sort_by(const Index* index, int64_t rows, int64_t each, int64_t weights, const WeightOrder& order,
             Refuse&& refuse) {
  std::fill_n(order.begin, weights + 1, 0);
  const auto is_weight = [&](int64_t e) { return e >= 0 && e < weights; };
  for (int64_t row = 0; row < rows; row++) {
    const int64_t e = index[row];
    if (is_weight(e)) [[likely]] order.begin[e + 1]++;
    else refuse(row, e);
  }
  for (int64_t e = 0; e < weights; e++) order.begin[e + 1] += order.begin[e];
  for (int64_t row = 0; row < rows; row++) {
    if (!is_weight(index[row])) continue;
    const int32_t at = order.begin[index[row]]++;
    order.y_row[at] = static_cast<int32_t>(row), order.x_row[at] = static_cast<int32_t>(row / each);
  }
  std::copy_backward(order.begin, order.begin + weights, order.begin + weights + 1);  // the ends have become begins
  order.begin[0] = 0;
}

template <class Refuse>
void sort_index(const TensorView& index, int64_t first, int64_t rows, int64_t each, int64_t weights,
                const WeightOrder& order, Refuse&& refuse) {
  if (index.dtype == DType::int64) sort_by(index.as<const int64_t>() + first, rows, each, weights, order, refuse);
  else sort_by(index.as<const int32_t>() + first, rows, each, weights, order, refuse);
}

}  // namespace

void sort_rows(const GatherLinearArgs& args, const WeightOrder& order) {
  const int64_t weights = args.weights(), columns = args.index.size(1);
  sort_index(args.index, 0, args.rows(), args.x.rank == 2 ? columns : 1, weights, order, [&](int64_t row, int64_t e) {
    throw Error(ErrorKind::value,
                concat("gather_linear: index must be 0 to ", weights - 1, ", as weight has shape ",
                       shape_text(args.weight), ", got index[", row / columns, ", ", row % columns, "] = ", e));
  });
}

void sort_pairs(const ExpertsArgs& args, int64_t first, int64_t tokens, const WeightOrder& order) {
  const int64_t experts = args.experts(), each = args.each();
  sort_index(args.index, first * each, tokens * each, each, experts, order, [&](int64_t pair, int64_t e) {
    if (e == experts) return;
    throw Error(ErrorKind::value,
                concat("experts: index must be 0 to ", experts - 1, ", as gate_up has shape ",
                       shape_text(args.gate_up.packed), ", or ", experts, " for no expert, got index[",
                       first + pair / each, ", ", pair % each, "] = ", e));
  });
}

}  // namespace lowbit::cpu
