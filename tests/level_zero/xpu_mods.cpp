// SPDX-License-Identifier: Apache-2.0
// attention_forward with a score_mod on tensors of torch's own xpu, without torch: `program code...`, of a mod that
// adds element k of a captured tensor. Prints the row, whether the result is the CPU's, and what a tensor that is too
// short gives.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "level_zero/runtime/memory.hpp"
#include "ops/attention.hpp"
#include "score/program.hpp"

namespace {

using namespace lowbit;

constexpr int64_t kLength = 40, kColumns = 16;
constexpr Device kXpu{DeviceType::xpu, 0};

TensorView dense(void* data, Device device, std::vector<int64_t> sizes) {
  TensorView view{.data = data, .dtype = DType::float32, .device = device, .rank = static_cast<int>(sizes.size())};
  int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) view.shape[d] = sizes[d], view.stride[d] = stride;
  return view;
}

void* take(std::string_view, Device, int64_t bytes, void** data) {
  return *data = level_zero::allocate(0, static_cast<std::size_t>(bytes));
}
constexpr MemoryKeeper kKeeper{take, level_zero::deallocate};

// Of the same numbers on either device; captured: elements of that tensor.
std::vector<float> attend(Device device, const std::vector<int64_t>& code, int64_t captured) {
  const int64_t elements = kLength * kColumns;
  const auto bytes = static_cast<std::size_t>(4 * elements + captured) * sizeof(float);
  auto* const memory = static_cast<float*>(level_zero::allocate(0, bytes));  // the host's, too
  for (int64_t i = 0; i < 4 * elements + captured; i++) memory[i] = static_cast<float>(i * 37 % 101) / 50.0f - 1.0f;
  std::vector<float> lse(kLength);
  const auto rows = [&](int which) {
    return dense(memory + which * elements, device, {1, 1, kLength, kColumns});
  };
  const ScoreCall mod("attend", "score_mod", code, {dense(memory + 4 * elements, device, {captured})});
  AttentionForwardArgs args{.place = {device}, .q = rows(0), .k = rows(1), .v = rows(2), .out = rows(3)};
  args.scale = 0.25, args.score_mod = &mod;
  check_args(args);
  attention_forward(args);
  const std::vector<float> out(memory + 3 * elements, memory + 4 * elements);
  level_zero::deallocate(memory);
  return out;
}

}  // namespace

int main(int count, char** arguments) {
  ask_for_memory(&kKeeper);
  std::vector<int64_t> code;
  for (int i = 1; i < count; i++) code.push_back(std::atoll(arguments[i]));
  const std::vector<float> here = attend({}, code, kLength), there = attend(kXpu, code, kLength);
  bool same = true;
  for (std::size_t i = 0; i < here.size(); i++) same &= std::abs(here[i] - there[i]) <= 1e-5f;
  std::printf("%s %d\n", std::string(last_kernel("attention_forward")).c_str(), same);
  try {
    attend(kXpu, code, kLength - 10);
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
  }
}
