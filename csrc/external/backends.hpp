// SPDX-License-Identifier: Apache-2.0
// Rows of third parties: from tables of C rows in shared libraries, or functions wrapped by the bindings. They are
// collected once, when the list of backends is first needed; the list never changes after that.
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

// Thrown by a Function for an exception that is not a failure of its row, such as Ctrl-C: the call ends with it.
struct PassedOn {
  std::exception_ptr exception;
};

// Like the functions of lowbit_row (lowbit/backend.h). 0: accepted or done; else the reason is in `text`.
using Function = std::function<int(const void* args, char* text, std::size_t bytes)>;
struct Row {
  std::string op, name, device;
  bool first = false;  // ahead of the rows of this build
  Function refuses, run;
};

struct AddedRow {
  std::string_view name, op, device, by;
};

// The rows in a library's table; throws Error (value) if the table is refused, as a whole.
LOWBIT_API std::vector<Row> rows_of_library(const std::string& path);

// Sets the function that collects the rows: called when the list is first needed, without a lock, perhaps
// by two threads.
LOWBIT_API void collect_with(void (*collect)());

// Called by that function: adds the rows of a package, all of them or, with an Error, none.
LOWBIT_API void add(const std::string& by, std::vector<Row> rows);
LOWBIT_API std::vector<AddedRow> added();
LOWBIT_API bool is_external(const Backend& backend);

// The list of all backends, best first: rows that ask to be first, this build's, the others, and last this build's own
// `providers`, which need a library that may be missing.
std::vector<const Backend*> with_external(std::span<const Backend* const> own,
                                          std::span<const Backend* const> providers);

}  // namespace lowbit::external
