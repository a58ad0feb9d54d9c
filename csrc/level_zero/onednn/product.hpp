// SPDX-License-Identifier: Apache-2.0
// Products of dense matrices by oneDNN's engine for an Intel GPU: a build with ONEDNN_GPU_RUNTIME=ZE, which takes our
// driver, device and context as they are.
#pragma once

#include <compare>
#include <memory>
#include <string>

#include "core/place.hpp"
#include "onednn/owned.hpp"
#include "ops/dense_product.hpp"

namespace lowbit::level_zero {

// A primitive, made once for all that it depends on.
class Product {
 public:
  struct Key {
    int16_t gpu;
    int64_t m, n, k;
    DType dtype;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  explicit Product(const Key& key);
  const std::string& reason() const { return reason_; }  // why oneDNN cannot run it; "" if it can
  int64_t room_bytes() const { return room_bytes_; }
  // What the tensors wait for must be done, and all is done when this returns. room: room_bytes() of the device.
  void run(const DenseProduct& product, void* room) const;

 private:
  Key key_;
  std::string reason_;
  int64_t room_bytes_ = 0;
  onednn::Owned<onednn::MemoryDesc> x_, w_, y_, room_;
  onednn::Owned<onednn::Primitive> matmul_;
};

// The one for sizes and dtype of a product on a device; this thread's. RuntimeError: why oneDNN is not there.
std::shared_ptr<const Product> product_for(Device device, const DenseProduct& of);

}  // namespace lowbit::level_zero
