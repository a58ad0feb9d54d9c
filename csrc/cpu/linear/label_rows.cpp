// SPDX-License-Identifier: Apache-2.0
#include "cpu/linear/label_rows.hpp"

#include "core/error.hpp"

namespace lowbit::cpu {

int64_t find_label_rows(const LinearCrossEntropyArgs& args, int32_t* rows) {
  const int64_t* const labels = args.labels.as<const int64_t>();
  int64_t count = 0;
  for (int64_t t = 0; t < args.rows(); t++) {
    if (labels[t] == args.ignore_index) continue;
    check(labels[t] >= 0 && labels[t] < args.spec.n, ErrorKind::value, "linear_cross_entropy: labels must be 0 to ",
          args.spec.n - 1, ", or ", args.ignore_index, " for a row without a loss, got labels[", t, "] = ", labels[t]);
    rows[count++] = static_cast<int32_t>(t);
  }
  return count;
}

}  // namespace lowbit::cpu
