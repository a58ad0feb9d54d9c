// SPDX-License-Identifier: Apache-2.0
// Rows on tensors of torch's own xpu, without torch: its queue (fake_c10_xpu.cpp) has still to write the weight when
// the call comes. Prints the row that ran and how many elements are not the CPU's, of all of the weight and of a row
// that is looked up, and what a row that is not there gives.
#include <cstdio>
#include <cstring>
#include <vector>

#include "level_zero/runtime/memory.hpp"
#include "ops/linear.hpp"
#include "ops/quantize.hpp"

extern void (*queued_by_torch)();

namespace {

using namespace lowbit;

TensorView dense(void* data, DType dtype, Device device, int64_t rows, int64_t columns) {
  TensorView view{.data = data, .dtype = dtype, .device = device, .rank = 2};
  view.shape = {rows, columns}, view.stride = {columns, 1};
  return view;
}

std::vector<uint8_t> packed;
void* packed_there = nullptr;

void* take(std::string_view, Device, int64_t bytes, void** data) {
  return *data = level_zero::allocate(0, static_cast<std::size_t>(bytes));
}
constexpr MemoryKeeper kKeeper{take, level_zero::deallocate};

void dequantize(const TensorView& packed, const WeightSpec& spec, const TensorView& out) {
  DequantizeArgs args = dequantize_args(packed, spec, out.dtype);
  args.out = out;
  run(args);
}

void print_row(const float* here, const float* there, int64_t count) {
  int different = 0;
  for (int64_t i = 0; i < count; i++) different += std::memcmp(&here[i], &there[i], sizeof(float)) != 0;
  std::printf("%s %d\n", std::string(last_kernel("dequantize")).c_str(), different);
}

}  // namespace

int main() {
  ask_for_memory(&kKeeper);
  constexpr int64_t n = 20, k = 70;
  const WeightSpec spec = weight_spec("test", n, k, static_cast<int64_t>(Format::int8), 0, false);
  std::vector<float> weight(n * k), here(n * k);
  for (std::size_t i = 0; i < weight.size(); i++) weight[i] = static_cast<float>(i * 37 % 101) - 50.0f;
  packed.resize(static_cast<std::size_t>(spec.panels() * spec.panel_bytes()));
  const TensorView packed_here = dense(packed.data(), DType::uint8, {}, spec.panels(), spec.panel_bytes());
  quantize(dense(weight.data(), DType::float32, {}, n, k), packed_here, spec, 0);
  dequantize(packed_here, spec, dense(here.data(), DType::float32, {}, n, k));

  const Device xpu{DeviceType::xpu, 0};
  packed_there = level_zero::allocate(0, packed.size());
  auto* const there = static_cast<float*>(level_zero::allocate(0, here.size() * sizeof(float)));
  queued_by_torch = [] { std::memcpy(packed_there, packed.data(), packed.size()); };
  dequantize(dense(packed_there, DType::uint8, xpu, spec.panels(), spec.panel_bytes()), spec,
             dense(there, DType::float32, xpu, n, k));
  print_row(here.data(), there, n * k);

  auto* const index = static_cast<int64_t*>(level_zero::allocate(0, sizeof(int64_t)));
  TensorView indices{.data = index, .dtype = DType::int64, .device = xpu, .rank = 1};
  indices.shape = {1}, indices.stride = {1};
  const TensorView weight_there = dense(packed_there, DType::uint8, xpu, spec.panels(), spec.panel_bytes());
  DequantizeArgs args = embedding_args(weight_there, indices, spec, 0, DType::float32);
  args.out = dense(there, DType::float32, xpu, 1, k);
  *index = 7;
  embedding(args);
  print_row(&here[7 * k], there, k);
  *index = n;
  try {
    embedding(args);
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
  }
  for (void* memory : {packed_there, static_cast<void*>(there), static_cast<void*>(index)})
    level_zero::deallocate(memory);
}
