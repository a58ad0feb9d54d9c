// SPDX-License-Identifier: Apache-2.0
// Handles of oneDNN with an owner.
#pragma once

#include <memory>
#include <type_traits>

#include "onednn/runtime.hpp"

namespace lowbit::onednn {

// Destroyed by the function of the library that its type has.
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

// What a primitive wants or has, as `what` (kQueryWeights ...) asks for it.
inline Owned<MemoryDesc> copy_of(const PrimitiveDescHandle* desc, int what) {
  const MemoryDescHandle* asked = nullptr;
  ensure(api().query(desc, what, 0, &asked), "dnnl_primitive_desc_query");
  MemoryDesc copy;
  ensure(api().desc_clone(&copy, asked), "dnnl_memory_desc_clone");
  return Owned<MemoryDesc>(copy);
}

inline Owned<Primitive> primitive(const PrimitiveDescHandle* desc) {
  Primitive made;
  ensure(api().primitive_create(&made, desc), "dnnl_primitive_create");
  return Owned<Primitive>(made);
}

}  // namespace lowbit::onednn
