// SPDX-License-Identifier: Apache-2.0
// A product of oneDNN with everything behind it in one primitive, made once for all that it depends on.
#pragma once

#include <array>
#include <compare>
#include <string>

#include "onednn/owned.hpp"
#include "ops/linear.hpp"

namespace lowbit::onednn {

// How the weight lies. Panels are our own (formats/format.hpp), which oneDNN has a name for where codes are floats.
// Weights of 16 bits that float32 is multiplied by, and float16 always, are brought into rows of k, [k, panels * 16]:
// in blocks, its own too, 3.13.1 multiplies them wrong from k = 576 on (it counts blocks of 32 k where there are 16).
// Other rows are signed codes [n, k], multiplied by codes or decoded by oneDNN and multiplied by floats.
enum class Weights { float32_panels, bfloat16_panels, bfloat16_rows, float16_rows, int8_rows, decoded_rows };

// All that a primitive depends on.
struct Product {
  Weights weights;
  int64_t m, n, k;     // k with padding
  int64_t group_size;  // of decoded rows; 0: a scale per column
  DType result;        // of y, mul and add, and of x where it is floats
  Activation activation;
  bool bias, mul, add;
  int threads;
  friend auto operator<=>(const Product&, const Product&) = default;
};

// Tensors of a call, as the primitive reads them: rows without gaps.
struct Operands {
  const void* x;              // [m, k]: floats or int8
  const void* weight;
  const float* row_scale;     // [m], of int8 x
  const float* column_scale;  // [n], of codes; of groups [k / group_size, n]
  const float* bias;          // [n]
  const void *mul, *add;      // [m, n]
  void* y;
};

class Matmul {
 public:
  explicit Matmul(const Product& product);
  const std::string& reason() const { return reason_; }  // why oneDNN cannot run it; "" if it can
  int64_t room_bytes() const { return weight_bytes_ + scratchpad_bytes_; }
  void run(const Operands& operands, void* room) const;  // room: room_bytes() of the caller, 64-byte aligned

 private:
  struct PostOp {  // its second operand: desc, and where in Operands it is
    Owned<MemoryDesc> desc;
    const void* (*operand)(const Operands&);
  };
  static constexpr int kMostPostOps = 6;

  void append(PostOps chain, int algorithm, int64_t rows, int64_t columns, int type,
              const void* (*operand)(const Operands&));
  Owned<PostOps> post_ops();
  Owned<Attributes> attributes();

  Product product_;
  std::string reason_;
  Owned<MemoryDesc> x_, weight_, read_weight_, y_, scratchpad_;  // read_weight_: as the primitive wants it
  Owned<MemoryDesc> group_scales_;
  std::array<PostOp, kMostPostOps> post_ops_;
  int post_op_count_ = 0;
  Owned<Primitive> reorder_, matmul_;
  int64_t weight_bytes_ = 0, scratchpad_bytes_ = 0;
};

// Made or found.
std::shared_ptr<const Matmul> matmul(const Product& product);
LOWBIT_API std::size_t kept_primitives();

}  // namespace lowbit::onednn
