// SPDX-License-Identifier: Apache-2.0
#include "onednn/matmul.hpp"

#include <list>
#include <map>

namespace lowbit::onednn {
namespace {

Owned<MemoryDesc> rows(int64_t m, int64_t n) {
  const int64_t shape[] = {m, n}, strides[] = {n, 1};
  MemoryDesc desc;
  ensure(api().strided_desc(&desc, 2, shape, kFloat32, strides), "dnnl_memory_desc_create_with_strides");
  return Owned<MemoryDesc>(desc);
}

// Our panels [n / 16][k / 16][16 k][16 n] as a matrix [k, n]. The meaning of a tag's number is up to the library, so
// the layout is verified.
Owned<MemoryDesc> panels(int64_t k, int64_t n) {
  const int64_t shape[] = {k, n};
  MemoryDesc made;
  ensure(api().tagged_desc(&made, 2, shape, kFloat32, kPanels16a16b), "dnnl_memory_desc_create_with_tag");
  Owned<MemoryDesc> desc(made);
  int count = 0;
  const int64_t *sizes = nullptr, *dims = nullptr;
  ensure(api().desc_query(made, kQueryInnerCount, &count), "dnnl_memory_desc_query");
  ensure(api().desc_query(made, kQueryInnerBlocks, &sizes), "dnnl_memory_desc_query");
  ensure(api().desc_query(made, kQueryInnerDims, &dims), "dnnl_memory_desc_query");
  const bool same = count == 2 && sizes[0] == 16 && sizes[1] == 16 && dims[0] == 0 && dims[1] == 1;
  check(same, ErrorKind::runtime, "oneDNN: format tag ", kPanels16a16b,
        " of this version is not that of panels of 16 columns");
  return desc;
}

Owned<Memory> memory(const Owned<MemoryDesc>& desc, const void* data) {
  Memory made;
  ensure(api().memory_create(&made, desc.get(), runtime().engine, const_cast<void*>(data)), "dnnl_memory_create");
  return Owned<Memory>(made);
}

}  // namespace

// The post-ops are the operations of csrc/cpu/linear/epilogue.hpp, in the same order.
Owned<Attributes> Matmul::attributes() const {
  PostOps made;
  ensure(api().post_ops_create(&made), "dnnl_post_ops_create");
  const Owned<PostOps> chain(made);
  const auto binary = [&](int algorithm, const Owned<MemoryDesc>& desc) {
    ensure(api().append_binary(made, algorithm, desc.get()), "dnnl_post_ops_append_binary");
  };
  if (product_.bias) binary(kBinaryAdd, bias_);
  if (product_.activation != Activation::none) {
    const int algorithm = product_.activation == Activation::silu ? kSwish : kGeluTanh;  // others are refused
    ensure(api().append_eltwise(made, algorithm, 1.0f, 0.0f), "dnnl_post_ops_append_eltwise");
  }
  if (product_.mul) binary(kBinaryMul, y_);
  if (product_.add) binary(kBinaryAdd, y_);
  Attributes attributes;
  ensure(api().attr_create(&attributes), "dnnl_primitive_attr_create");
  Owned<Attributes> owned(attributes);
  ensure(api().set_scratchpad(attributes, kUserScratchpad), "dnnl_primitive_attr_set_scratchpad_mode");
  // ONEDNN_DEFAULT_FPMATH_MODE could have float32 rounded to bfloat16.
  ensure(api().set_math(attributes, kStrictMath), "dnnl_primitive_attr_set_fpmath_mode");
  ensure(api().set_post_ops(attributes, made), "dnnl_primitive_attr_set_post_ops");
  return owned;
}

Matmul::Matmul(const Product& product)
    : product_(product), x_(rows(product.m, product.k)), weight_(panels(product.k, product.n)),
      bias_(rows(1, product.n)), y_(rows(product.m, product.n)) {
  PrimitiveDesc made;
  const int status =
      api().matmul(&made, runtime().engine, x_.get(), weight_.get(), nullptr, y_.get(), attributes().get());
  if (status == kUnimplemented) {
    reason_ = "oneDNN has no implementation of this product here";
    return;
  }
  ensure(status, "dnnl_matmul_primitive_desc_create");
  const Owned<PrimitiveDesc> desc(made);
  const char* implementation = "";
  ensure(api().query(made, kQueryImplementation, 0, &implementation), "dnnl_primitive_desc_query");
  if (std::string_view(implementation).starts_with("ref")) {
    reason_ = concat("oneDNN has only its reference implementation of this product here, ", implementation);
    return;
  }
  Primitive matmul;
  ensure(api().primitive_create(&matmul, made), "dnnl_primitive_create");
  matmul_.reset(matmul);
  const MemoryDescHandle* asked = nullptr;
  ensure(api().query(made, kQueryScratchpad, 0, &asked), "dnnl_primitive_desc_query");
  MemoryDesc scratchpad;
  ensure(api().desc_clone(&scratchpad, asked), "dnnl_memory_desc_clone");
  scratchpad_.reset(scratchpad);
  scratchpad_bytes_ = static_cast<int64_t>(api().desc_bytes(scratchpad));
}

void Matmul::run(const Operands& operands) const {
  Stream made;
  ensure(api().stream_create(&made, runtime().engine, kInOrder), "dnnl_stream_create");
  const Owned<Stream> stream(made);
  std::array<Owned<Memory>, 7> memories;
  std::array<Argument, 7> arguments;
  int count = 0, post_ops = 0;
  const auto give = [&](int which, const Owned<MemoryDesc>& desc, const void* data) {
    Owned<Memory>& given = memories[static_cast<std::size_t>(count)] = memory(desc, data);
    arguments[static_cast<std::size_t>(count++)] = {which, given.get()};
  };
  give(kSource, x_, operands.x), give(kWeights, weight_, operands.weight), give(kDestination, y_, operands.y);
  give(kScratchpad, scratchpad_, operands.scratchpad);
  if (product_.bias) give(argument_of_post_op(post_ops++), bias_, operands.bias);
  if (product_.activation != Activation::none) post_ops++;  // without a second operand
  if (product_.mul) give(argument_of_post_op(post_ops++), y_, operands.mul);
  if (product_.add) give(argument_of_post_op(post_ops++), y_, operands.add);
  ensure(api().execute(matmul_.get(), stream.get(), count, arguments.data()), "dnnl_primitive_execute");
  ensure(api().stream_wait(stream.get()), "dnnl_stream_wait");
}

namespace {
using RecentMatmuls = std::list<std::pair<Product, std::shared_ptr<const Matmul>>>;
thread_local RecentMatmuls kept;  // most recently used first
thread_local std::map<Product, RecentMatmuls::iterator> found;
}  // namespace

std::shared_ptr<const Matmul> matmul(const Product& product) {
  if (const auto at = found.find(product); at != found.end()) {
    kept.splice(kept.begin(), kept, at->second);
    return kept.front().second;
  }
  kept.emplace_front(product, std::make_shared<const Matmul>(product));
  found[product] = kept.begin();
  if (kept.size() > kMaxKept) {
    found.erase(kept.back().first);
    kept.pop_back();
  }
  return kept.front().second;
}

std::size_t kept_primitives() { return kept.size(); }

}  // namespace lowbit::onednn
