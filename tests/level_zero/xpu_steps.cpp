// SPDX-License-Identifier: Apache-2.0
// Steps of AdamW with 8-bit states, one of which found_inf leaves out, on tensors of torch's own xpu, without torch.
// Prints how many were counted on the CPU and there, the row, and whether every tensor has the bits of the CPU's.
#include <cstdio>
#include <cstring>
#include <vector>

#include "level_zero/runtime/memory.hpp"
#include "ops/optim.hpp"

namespace {

using namespace lowbit;

constexpr Device kXpu{DeviceType::xpu, 0};
constexpr int64_t kBlock = 256, kNumels[] = {1000, 9000};

// Shared memory for either device: what the test looks at, the host can read.
struct Memory {
  char* begin = static_cast<char*>(level_zero::allocate(0, 1 << 20));
  std::size_t used = 0;
  ~Memory() { level_zero::deallocate(begin); }

  TensorView take(Device device, DType dtype, int64_t numel) {
    TensorView view{.data = begin + used, .dtype = dtype, .device = device, .rank = 1};
    view.shape = {numel}, view.stride = {1};
    used += static_cast<std::size_t>(numel + 16) * size_of(dtype);
    used = (used + 63) / 64 * 64;
    return view;
  }
};

struct Tensors {
  TensorView param, grad, step, moment[2], scale[2];
};

// Every byte of the tensors after the steps.
std::vector<char> steps(Device device) {
  Memory memory;
  std::memset(memory.begin, 0, 1 << 20);
  const TensorView grad_scale = memory.take(device, DType::float32, 1);
  const TensorView found_inf = memory.take(device, DType::float32, 1);
  *grad_scale.as<float>() = 4;
  std::vector<Tensors> all;
  for (const int64_t numel : kNumels) {
    Tensors of{memory.take(device, DType::float32, numel), memory.take(device, DType::float32, numel),
               memory.take(device, DType::float32, 1)};
    for (int i = 0; i < 2; i++) {
      of.moment[i] = memory.take(device, DType::uint8, numel);
      of.scale[i] = memory.take(device, DType::float32, (numel + kBlock - 1) / kBlock);
    }
    for (int64_t i = 0; i < numel; i++) of.param.as<float>()[i] = static_cast<float>(i * 37 % 101) / 50.0f - 1.0f;
    all.push_back(of);
  }
  for (int step = 0; step < 4; step++) {
    *found_inf.as<float>() = step == 1;
    OptimStep made(static_cast<int64_t>(Rule::adamw), static_cast<int64_t>(StateFormat::dynamic8), kBlock,
                   Hyper{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .decoupled = true},
                   grad_scale, found_inf, std::nullopt);
    for (const Tensors& of : all) {
      for (int64_t i = 0; i < of.grad.numel(); i++)
        of.grad.as<float>()[i] = static_cast<float>((i + step) * 53 % 97) / 10.0f - 4.0f;
      made.add(of.param, of.grad, of.step, of.moment, of.scale);
    }
    made.run();
  }
  std::printf("%g steps\n", static_cast<double>(*all[0].step.as<float>()));
  return {memory.begin, memory.begin + memory.used};
}

void* take(std::string_view, Device, int64_t bytes, void** data) {
  return *data = level_zero::allocate(0, static_cast<std::size_t>(bytes));
}
constexpr MemoryKeeper kKeeper{take, level_zero::deallocate};

}  // namespace

int main() {
  ask_for_memory(&kKeeper);
  const std::vector<char> here = steps({}), there = steps(kXpu);
  std::printf("%s %d\n", std::string(last_kernel("optim_step")).c_str(), here == there);
}
