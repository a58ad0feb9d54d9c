// SPDX-License-Identifier: Apache-2.0
#include "cpu/linear/weight_order.hpp"

#include <algorithm>

namespace lowbit::cpu {
namespace {

template <class Index>
void sort_by(const Index* index, const GatherLinearArgs& args, const WeightOrder& order) {
  const int64_t rows = args.rows(), weights = args.weights();
  std::fill_n(order.begin, weights + 1, 0);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t e = index[row];
    if (e < 0 || e >= weights) [[unlikely]]
      throw Error(ErrorKind::value,
                  concat("gather_linear: index must be 0 to ", weights - 1, ", as weight has shape ",
                         shape_text(args.weight), ", got index[", row / args.index.size(1), ", ",
                         row % args.index.size(1), "] = ", e));
    order.begin[e + 1]++;
  }
  for (int64_t e = 0; e < weights; e++) order.begin[e + 1] += order.begin[e];
  for (int64_t row = 0; row < rows; row++) {
    const int32_t at = order.begin[index[row]]++;
    order.y_row[at] = static_cast<int32_t>(row), order.x_row[at] = static_cast<int32_t>(args.row_of_x(row));
  }
  std::copy_backward(order.begin, order.begin + weights, order.begin + weights + 1);  // the ends have become begins
  order.begin[0] = 0;
}

}  // namespace

void sort_rows(const GatherLinearArgs& args, const WeightOrder& order) {
  if (args.index.dtype == DType::int64) sort_by(args.index.as<const int64_t>(), args, order);
  else sort_by(args.index.as<const int32_t>(), args, order);
}

}  // namespace lowbit::cpu
