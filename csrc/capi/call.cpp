// SPDX-License-Identifier: Apache-2.0
#include "capi/call.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "core/error.hpp"
#include "core/parallel.hpp"
#include "core/thread_count.hpp"
#include "ops/linear.hpp"
#include "ops/quantize.hpp"

namespace lowbit::capi {

using enum ErrorKind;

namespace {

constexpr int number_of(ErrorKind kind) { return static_cast<int>(kind) + 1; }
static_assert(number_of(value) == LOWBIT_VALUE_ERROR && number_of(type) == LOWBIT_TYPE_ERROR &&
              number_of(index) == LOWBIT_INDEX_ERROR && number_of(not_implemented) == LOWBIT_NOT_IMPLEMENTED &&
              number_of(runtime) == LOWBIT_RUNTIME_ERROR);

constexpr std::size_t kMaxStructBytes = 4096;  // a larger struct_size is uninitialized memory
constexpr int64_t kMaxElements = int64_t{1} << 56;

thread_local std::string kept_text;
thread_local const char* last_error = "";

int failed_with(int status, const char* text) noexcept {
  try {
    kept_text = text;
    last_error = kept_text.c_str();
  } catch (...) {
    last_error = "lowbit: out of memory, also for the text of an error";
  }
  return status;
}

TensorView view_of(std::string_view op, std::string_view name, const lowbit_tensor& given) {
  check(given.dtype >= 0 && given.dtype < LOWBIT_NOT_GIVEN, type, op, ": ", name,
        " must have a dtype of enum lowbit_dtype, got dtype=", given.dtype);
  check(given.rank >= 0 && given.rank <= TensorView::kMaxRank, value, op, ": ", name, " must have rank 0..",
        TensorView::kMaxRank, ", got rank=", given.rank);
  check(given.shape || given.rank == 0, value, op, ": ", name, " must have a shape, got NULL");
  TensorView view{.data = given.data, .dtype = static_cast<DType>(given.dtype), .rank = given.rank};
  std::copy_n(given.shape, given.rank, view.shape.begin());
  int64_t count = 1;
  for (int i = given.rank - 1; i >= 0; i--) {
    view.stride[i] = given.stride ? given.stride[i] : count;
    check(view.shape[i] >= 0 && !__builtin_mul_overflow(count, std::max<int64_t>(view.shape[i], 1), &count) &&
              count <= kMaxElements,
          value, op, ": ", name, " must have sizes of 0 or more, and at most 2^56 elements, got ", shape_text(view));
  }
  check(view.data || view.numel() == 0, value, op, ": ", name, " must have data, got NULL");
  return view;
}

}  // namespace

int failed() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return failed_with(number_of(error.kind), error.what());
  } catch (const std::bad_alloc&) {
    return failed_with(LOWBIT_OUT_OF_MEMORY, "lowbit: out of memory");
  } catch (const std::exception& error) {
    return failed_with(LOWBIT_RUNTIME_ERROR, error.what());
  } catch (...) {
    return failed_with(LOWBIT_RUNTIME_ERROR, "lowbit: an exception that is no std::exception");
  }
}

TensorView tensor(std::string_view op, std::string_view name, const lowbit_tensor* given) {
  check(given && given->dtype != LOWBIT_NOT_GIVEN, value, op, ": ", name, " must be given, got none");
  return view_of(op, name, *given);
}

TensorView optional(std::string_view op, std::string_view name, const lowbit_tensor* given) {
  return given && given->dtype != LOWBIT_NOT_GIVEN ? view_of(op, name, *given) : TensorView{};
}

void copy_struct(std::string_view op, std::string_view name, const void* given, void* to, std::size_t size,
                 std::size_t first_size) {
  std::size_t its_size;
  std::memcpy(&its_size, given, sizeof its_size);
  check(its_size >= first_size && its_size <= kMaxStructBytes, value, op, ": ", name,
        " must have struct_size set to sizeof, ", size, " bytes in API version ", LOWBIT_API_VERSION,
        ", got struct_size=", its_size);
  const char* const bytes = static_cast<const char*>(given);
  check(its_size <= size || std::all_of(bytes + size, bytes + its_size, [](char byte) { return byte == 0; }), value, op,
        ": ", name, " has a field that API version ", LOWBIT_API_VERSION, " of this library does not know: its first ",
        size, " bytes are known, got struct_size=", its_size, " and bytes behind them that are not 0");
  std::memcpy(to, given, std::min(size, its_size));
}

PackedWeight described_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given) {
  check(given, value, op, ": ", name, " must be given, got NULL");
  lowbit_packed_weight weight{};
  copy_struct(op, name, given, &weight, sizeof weight, kFirstSize<lowbit_packed_weight>);
  check(weight.n < kMaxElements && weight.k < kMaxElements &&
            (weight.n < 1 || weight.k < 1 || weight.n <= kMaxElements / weight.k),
        value, op, ": ", name, " must have at most 2^56 elements, got n=", weight.n, " k=", weight.k);
  const WeightSpec spec =
      weight_spec(op, weight.n, weight.k, weight.format, weight.group_size, weight.asymmetric != 0);
  const Layout its_layout = layout(op, weight.layout);
  const Sections sections = lowbit::sections(its_layout, spec);
  TensorView packed{.data = weight.data, .dtype = DType::uint8, .rank = 2};
  packed.shape = {sections.rows, sections.row_bytes}, packed.stride = {sections.row_bytes, 1};
  return {spec, its_layout, sections, packed};
}

PackedWeight packed_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given) {
  const PackedWeight weight = described_weight(op, name, given);
  check(given->bytes == weight.packed.numel(), value, op, ": ", name, " must have the ", weight.packed.numel(),
        " bytes of ", kFormatNames[static_cast<int>(weight.spec.format)], " with n=", weight.spec.n,
        " k=", weight.spec.k, " group_size=", weight.spec.group_size, " asymmetric=", weight.spec.asymmetric, " in ",
        kLayoutNames[static_cast<int>(weight.layout)], ", got bytes=", given->bytes);
  check(given->data, value, op, ": ", name, " must have data, got NULL");
  return weight;
}

PackedWeight kernel_weight(std::string_view op, std::string_view name, const lowbit_packed_weight* given) {
  const PackedWeight weight = packed_weight(op, name, given);
  check_kernel_layout(op, name, weight.layout);
  return weight;
}

void check_kernel_layout(std::string_view op, std::string_view name, Layout layout) {
  check(layout == kKernelLayout, value, op, ": ", name, " must be in the layout ",
        kLayoutNames[static_cast<int>(kKernelLayout)], " (lowbit_repack), got ",
        kLayoutNames[static_cast<int>(layout)]);
}

extern "C" {

int lowbit_api_version() { return LOWBIT_API_VERSION; }

const char* lowbit_last_error() { return last_error; }

int lowbit_num_threads() {
  int threads = 1;  // kept if there is no memory for the pool
  status_of([&] { threads = num_threads(); });
  return threads;
}

int lowbit_set_num_threads(int threads) {
  return status_of([&] { set_num_threads(threads); });
}

int lowbit_as_team(void (*body)(void* context), void* context) {
  return status_of([&] {
    check(body, value, "as_team: body must be given, got NULL");
    as_team(body, context);
  });
}

}  // extern "C"
}  // namespace lowbit::capi
