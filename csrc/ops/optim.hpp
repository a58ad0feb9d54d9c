// SPDX-License-Identifier: Apache-2.0
// optim_step: one step of an optimizer over a list of tensors, in place: parameters, moments (in their StateFormat) and
// step counts.
//   g = grad / grad_scale (written back), negated if maximize; weight decay; rule(p, g, moments);
//   every moment rounded to its format
// The update uses the moments before they are rounded. Arithmetic is float32; parameters are rounded to
// nearest, or stochastically. A bfloat16 parameter with a correction (int8) is the leading 24 bits of a float32: the
// step reads and writes both, and the parameter alone is the nearest bfloat16 value (cpu/optim/correction.hpp).
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/tensor_view.hpp"
#include "formats/state_format.hpp"
#include "ops/kernel.hpp"
#include "ops/optim_tensor.hpp"

namespace lowbit {

// The row reads the numbers behind pointers, on its device: a GradScaler never has to wait for them.
struct OptimStepArgs {
  Place place{};
  Rule rule = Rule::adamw;
  int moments = 0;  // number of moments that the rule keeps, given hyper
  StateFormat format = StateFormat::float32;
  int64_t block_size = 0;
  Hyper hyper = {};
  std::span<const OptimTensor> tensors = {};
  const float* grad_scale = nullptr;  // divisor of the gradients; null: 1
  const float* found_inf = nullptr;   // if not 0, the step does nothing, as in torch's fused optimizers; null: 0
  bool stochastic_rounding = false;   // for bfloat16 parameters
  uint64_t seed = 0;                  // seed of stochastic rounding, combined with the step and the index in the list
  std::span<uint8_t* const> corrections = {};  // bits of the int8 correction of each bfloat16 parameter, or none
};

// float32 values to codes and scales: how a step stores a moment.
struct EncodeStateArgs {
  Place place{};
  StateFormat format = StateFormat::dynamic8;
  bool is_signed = true;
  int64_t block_size = 0;
  TensorView values;        // float32, dense
  TensorView codes, scale;  // written
};

// Codes and scales to float32 values.
struct DecodeStateArgs {
  Place place{};
  StateFormat format = StateFormat::dynamic8;
  bool is_signed = true;
  int64_t block_size = 0;
  TensorView codes, scale;
  TensorView values;  // written
};

// Assembles a step, tensor by tensor: every check happens before run() changes anything.
class LOWBIT_API OptimStep {
 public:
  OptimStep(int64_t rule, int64_t format, int64_t block_size, const Hyper& hyper, const TensorView& grad_scale,
            const TensorView& found_inf, std::optional<int64_t> seed);
  int moments() const { return args_.moments; }
  bool has_scales() const { return has_codes(args_.format); }

  // `step` is one float32, incremented by run(). moment and scale have moments() entries; float formats ignore scale.
  // Either all tensors of a step have a correction, or none.
  void add(const TensorView& param, const TensorView& grad, const TensorView& step, const TensorView* moment,
           const TensorView* scale, const TensorView& correction = {});
  void run();

 private:
  OptimStepArgs args_;
  std::vector<OptimTensor> tensors_;
  std::vector<uint8_t*> corrections_;
  TensorView first_, grad_scale_, found_inf_;  // the first parameter; the other two must be on its device
};

LOWBIT_API StateFormat state_format(std::string_view op, int64_t format, int64_t block_size);
LOWBIT_API void encode_state(EncodeStateArgs args);
LOWBIT_API void decode_state(DecodeStateArgs args);

LOWBIT_API Call describe(const OptimStepArgs& args);
LOWBIT_API Call describe(const EncodeStateArgs& args);
LOWBIT_API Call describe(const DecodeStateArgs& args);

}  // namespace lowbit
