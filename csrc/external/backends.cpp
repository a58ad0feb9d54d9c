// SPDX-License-Identifier: Apache-2.0
#include "external/backends.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <utility>

#include "external/calls.hpp"
#include "ops/kernel.hpp"

namespace lowbit::external {
namespace {

using enum ErrorKind;

struct ForeignRow {
  Row row;
  std::string by;
};

void put(char* text, std::size_t bytes, const char* message) {
  std::strncpy(text, message, bytes - 1);
  text[bytes - 1] = 0;
}

// Calls another package's function and returns its result; an exception becomes a text, unless it is passed on.
int guarded(const Function& function, const void* args, char* text, std::size_t bytes) {
  text[0] = 0;
  int result = 1;
  try {
    result = function(args, text, bytes);
  } catch (const PassedOn& passed) {
    std::rethrow_exception(passed.exception);
  } catch (const std::exception& error) {
    put(text, bytes, error.what());
  } catch (...) {
    put(text, bytes, "it threw something that is no std::exception");
  }
  text[bytes - 1] = 0;
  if (result && !text[0]) put(text, bytes, "it gave no reason");
  return result;
}

// Refuses weights whose codes backend.h does not describe.
template <class Args>
bool is_told(const Args& args) {
  if constexpr (requires { args.weight_spec; }) return !is_semi_sparse(args.weight_spec.format);
  else if constexpr (requires { args.spec.format; }) return !is_semi_sparse(args.spec.format);
  else return true;
}

template <class Args>
std::string_view refuses(const Args& args, const void* self) {
  const ForeignRow& foreign = *static_cast<const ForeignRow*>(self);
  if (!is_told(args)) return "a 2:4 weight, which rows of other packages cannot read";
  if (const std::string_view reason = not_offered(args); !reason.empty()) return reason;
  if (!foreign.row.refuses) return "";
  static thread_local char text[512];  // read before the next row is asked
  const Call<Args> call(args);
  return guarded(foreign.row.refuses, &call.c, text, sizeof text) ? text : "";
}

template <class Args>
void run(const Args& args, const void* self) {
  const ForeignRow& foreign = *static_cast<const ForeignRow*>(self);
  const Call<Args> call(args);
  char text[2048];
  check(guarded(foreign.row.run, &call.c, text, sizeof text) == 0, runtime, OpOf<Args>::name, ": the row ",
        foreign.row.name, " of ", foreign.by, " failed: ", text);
}

// Calls body.operator()<Args>() for the op with this name; false if it is not offered.
template <class Body>
bool with_op(std::string_view name, Body&& body) {
#define F(field)
#define H(field)
#define LOWBIT_OP(op, Args, fields) \
  if (name == #op) return body.template operator()<Args>(), true;
  LOWBIT_OFFERED_OPS(LOWBIT_OP)
#undef LOWBIT_OP
#undef F
#undef H
  return false;
}

// Rows are added under the lock of the function that collects them; rows and backends are never freed. Initialized when
// the library is loaded: a child forked while another thread initializes a function's static would wait forever.
std::deque<ForeignRow>& all_foreign = *new std::deque<ForeignRow>;
std::atomic<void (*)()> collector{nullptr};
std::atomic<bool> complete{false};
std::atomic<const std::vector<const Backend*>*> own_backends{nullptr};

bool has_row(std::string_view name) {
  for (const ForeignRow& foreign : all_foreign)
    if (foreign.row.name == name) return true;
  for (const Backend* backend : *own_backends.load()) {
#define LOWBIT_OP(op, Args) \
  for (const auto& row : backend->op) if (row.name == name) return true;
    LOWBIT_OPS(LOWBIT_OP)
#undef LOWBIT_OP
  }
  return false;
}

void check_row(const std::string& by, const Row& row, std::span<const Row> before) {
  device_type(concat(by, ": ", row.name), row.device);
  check(row.name.starts_with(row.op + "_") && row.name.size() > row.op.size() + 1, value, by,
        ": the name of a row must begin with ", row.op, "_, got '", row.name, "'");
  const auto same_name = [&](const Row& other) { return other.name == row.name; };
  check(!has_row(row.name) && std::none_of(before.begin(), before.end(), same_name), value, by, ": there is a row '",
        row.name, "' already");
  check(static_cast<bool>(row.run), value, by, ": the row ", row.name, " must have a function that runs it");
  check(with_op(row.op, []<class Args>() {}), value, by, ": the row ", row.name,
        " must serve an op that is offered, got '", row.op, "'");
}

Backend backend_like(const Backend& own, const std::string& by) {
  return {.name = by, .device = own.device, .unavailable = own.unavailable, .guard = own.guard};
}

}  // namespace

void collect_with(void (*collect)()) { collector = collect; }

void add(const std::string& by, std::vector<Row> rows) {
  check(own_backends.load() && !complete, runtime, by, ": the list of backends is complete; rows are added by the ",
        "function that a package names in the entry point group lowbit.backends");
  for (std::size_t i = 0; i < rows.size(); i++) check_row(by, rows[i], std::span(rows).first(i));
  for (Row& row : rows) all_foreign.push_back({std::move(row), by});
}

std::vector<AddedRow> added() {
  std::vector<AddedRow> rows;
  backends();
  for (const auto& [row, by] : all_foreign) rows.push_back({row.name, row.op, row.device, by});
  return rows;
}

bool is_external(const Backend& backend) {
  for (const ForeignRow& foreign : all_foreign)
    if (foreign.by == backend.name) return true;
  return false;
}

std::vector<const Backend*> with_external(std::span<const Backend* const> own,
                                          std::span<const Backend* const> providers) {
  const std::vector<const Backend*>* none = nullptr;
  auto* mine = new std::vector<const Backend*>(own.begin(), own.end());
  mine->insert(mine->end(), providers.begin(), providers.end());
  if (!own_backends.compare_exchange_strong(none, mine)) delete mine;
  if (auto* const collect = collector.load()) collect();
  complete = true;
  std::vector<const Backend*> first, behind;
  for (const ForeignRow& foreign : all_foreign) {
    // This row needs the same guard as the device's own rows. The last of its backends has the fewest requirements.
    const auto like = std::find_if(own.rbegin(), own.rend(), [&](const Backend* backend) {
      return name_of(backend->device) == foreign.row.device;
    });
    if (like == own.rend()) continue;  // this build lacks the device: no call can reach it
    auto& list = foreign.row.first ? first : behind;
    auto* backend = new Backend(backend_like(**like, foreign.by));
    with_op(foreign.row.op, [&]<class Args>() {
      const auto* const bound = new typename Kernel<Args>::Bound{&foreign, refuses<Args>, run<Args>};
      const Kernel<Args> kernel{foreign.row.name, nullptr, nullptr, bound};
      add_rows(*backend, &kernel, 1);
    });
    list.push_back(backend);
  }
  first.insert(first.end(), own.begin(), own.end());
  first.insert(first.end(), behind.begin(), behind.end());
  first.insert(first.end(), providers.begin(), providers.end());
  return first;
}

}  // namespace lowbit::external
