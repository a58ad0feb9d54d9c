// SPDX-License-Identifier: Apache-2.0
// A float32 product of oneDNN with its epilogue, as one primitive, created once per Product.
#pragma once

#include <array>
#include <compare>
#include <memory>
#include <string>

#include "onednn/runtime.hpp"
#include "ops/linear.hpp"

namespace lowbit::onednn {

// Owned handles, destroyed by the library's function for their type.
struct Destroy {
  void operator()(MemoryDesc desc) const { api().desc_destroy(desc); }
  void operator()(Memory memory) const { api().memory_destroy(memory); }
  void operator()(PostOps post_ops) const { api().post_ops_destroy(post_ops); }
  void operator()(Attributes attributes) const { api().attr_destroy(attributes); }
  void operator()(PrimitiveDesc desc) const { api().primitive_desc_destroy(desc); }
  void operator()(Primitive primitive) const { api().primitive_destroy(primitive); }
  void operator()(Stream stream) const { api().stream_destroy(stream); }
};
template <class Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;

// The key of a primitive. The weight is in our own panels (formats/format.hpp), a layout that oneDNN has a tag for.
struct Product {
  int64_t m, n, k;  // k includes padding
  Activation activation;
  bool bias, mul, add;
  int threads;
  friend auto operator<=>(const Product&, const Product&) = default;
};

// float32 tensors of a call, with dense rows.
struct Operands {
  const void *x, *weight, *bias, *mul, *add;  // [m, k], panels, [n], [m, n], [m, n]
  void* y;                                    // [m, n]
  void* scratchpad;                           // 64-byte aligned, scratchpad_bytes()
};

class Matmul {
 public:
  explicit Matmul(const Product& product);
  const std::string& reason() const { return reason_; }  // why oneDNN cannot run it, or ""
  int64_t scratchpad_bytes() const { return scratchpad_bytes_; }
  void run(const Operands& operands) const;

 private:
  Owned<Attributes> attributes() const;

  std::string reason_;
  Product product_;
  Owned<MemoryDesc> x_, weight_, bias_, y_, scratchpad_;  // mul and add are like y
  Owned<Primitive> matmul_;
  int64_t scratchpad_bytes_ = 0;
};

// Finds or creates a primitive. Each thread keeps the kMaxKept most recently used: there is no lock that a forked child
// could find held. oneDNN shares the bulk of equal primitives, their code.
std::shared_ptr<const Matmul> matmul(const Product& product);
constexpr std::size_t kMaxKept = 256;
LOWBIT_API std::size_t kept_primitives();

}  // namespace lowbit::onednn
