// SPDX-License-Identifier: Apache-2.0
// Rows of third parties: from tables of C rows in shared libraries, or functions that the bindings wrap. They are
// collected once, when the list of backends is first needed, and the list is complete from then on.
#pragma once

#include <exception>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/error.hpp"

namespace lowbit {
struct Backend;
}

namespace lowbit::external {

// Thrown by a Function for an exception that is no failure of its row, such as Ctrl-C: the call ends with it.
struct PassedOn {
  std::exception_ptr exception;
};

// As lowbit_row (lowbit/backend.h) has it. 0: fits, done; else the reason is in `text`.
using Function = std::function<int(const void* args, char* text, std::size_t bytes)>;
struct Row {
  std::string op, name, device;
  bool first = false;  // before the rows of this build
  Function refuses, run;
};

struct AddedRow {
  std::string_view name, op, device, by;
};

// The rows of a library's table; Error (value) says why it is refused, and then none of them is there.
LOWBIT_API std::vector<Row> rows_of_library(const std::string& path);

// The function that collects the rows: called when the list is first needed, without a lock, perhaps by two threads.
LOWBIT_API void collect_with(void (*collect)());

// Called by that function: the rows of a package, all or, where an Error says why not, none.
LOWBIT_API void add(const std::string& by, std::vector<Row> rows);
LOWBIT_API std::vector<AddedRow> added();
LOWBIT_API bool is_external(const Backend& backend);

// The list of all backends, best first: rows that want to be first, this build's, the others, and behind them this
// build's own `providers`, which need a library that may not be there.
std::vector<const Backend*> with_external(std::span<const Backend* const> own,
                                          std::span<const Backend* const> providers);

}  // namespace lowbit::external
