// SPDX-License-Identifier: Apache-2.0
#include "ops/preferred_row.hpp"

namespace lowbit {

int64_t number_of_row(std::string_view op, std::string_view name) {
  std::string rows;
  for (const RowInfo& row : rows_of(op)) {
    if (row.name == name) return row_number(name);
    rows += concat(rows.empty() ? "" : ", ", row.name);
  }
  throw Error(ErrorKind::value, concat("row_number: ", op, " has no row '", name, "', wanted one of ", rows));
}

}  // namespace lowbit
