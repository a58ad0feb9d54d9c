// SPDX-License-Identifier: Apache-2.0
#include "external/backends.hpp"

#include "core/os.hpp"
#include "external/calls.hpp"

namespace lowbit::external {
namespace {

using enum ErrorKind;

std::size_t args_size(std::string_view name) {
#define F(field)
#define H(field)
#define LOWBIT_OP(op, Args, fields) \
  if (name == #op) return sizeof(lowbit_##op##_args);
  LOWBIT_OFFERED_OPS(LOWBIT_OP)
#undef LOWBIT_OP
#undef F
#undef H
  return 0;
}

Row checked(const std::string& path, const lowbit_row& row) {
  check(row.op && row.name && row.device && row.run, value, path, ": a row must have op, name, device and run");
  const std::size_t size = args_size(row.op);
  check(size > 0, value, path, ": the row ", row.name, " must serve an op that is offered, got '", row.op, "'");
  check(row.args_size == size, value, path, ": the row ", row.name, " must be built with lowbit_", row.op, "_args of ",
        size, " bytes, got ", row.args_size);
  return {row.op, row.name, row.device, row.first != 0, row.refuses ? Function(row.refuses) : Function(), row.run};
}

}  // namespace

std::vector<Row> rows_of_library(const std::string& path) {
  void* const library = os::open_library(path.c_str());
  if (!library) throw Error(value, concat(path, ": cannot be loaded: ", os::why_not_opened()));
  auto* const table_of = reinterpret_cast<const lowbit_rows* (*)()>(os::find_symbol(library, "lowbit_backend_rows"));
  check(table_of, value, path, ": has no function lowbit_backend_rows");
  const lowbit_rows* const table = table_of();
  check(table, value, path, ": lowbit_backend_rows returned NULL");
  check(table->struct_size == sizeof(lowbit_rows), value, path, ": lowbit_rows must have ", sizeof(lowbit_rows),
        " bytes, got struct_size=", table->struct_size);
  check(table->api_version == LOWBIT_BACKEND_API, value, path, ": api_version must be ", LOWBIT_BACKEND_API, ", got ",
        table->api_version);
  check(table->row_size == sizeof(lowbit_row), value, path, ": lowbit_row must have ", sizeof(lowbit_row),
        " bytes, got row_size=", table->row_size);
  check(table->count >= 0 && (table->rows || table->count == 0), value, path, ": the table must have rows");
  std::vector<Row> rows;
  for (int64_t i = 0; i < table->count; i++) rows.push_back(checked(path, table->rows[i]));
  return rows;
}

}  // namespace lowbit::external
