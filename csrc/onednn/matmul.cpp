// SPDX-License-Identifier: Apache-2.0
#include "onednn/matmul.hpp"

#include "onednn/kept.hpp"

namespace lowbit::onednn {
namespace {

// From how many rows on bfloat16 panels are brought into oneDNN's own blocks for the call. In place they are multiplied
// 16 columns at a time: as fast for a few rows, 2.4 times slower for 512, of which bringing them is a twentieth.
constexpr int64_t kReorderRows = 17;

// A matrix, or of a product of codes one of a batch of one: only there a post-op may have one number for each row.
Owned<MemoryDesc> strided(Weights of, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                          int type) {
  const int64_t shape[] = {1, rows, columns}, strides[] = {rows * columns, row_stride, column_stride};
  const int plain = of == Weights::int8_rows ? 0 : 1;
  MemoryDesc desc;
  ensure(api().strided_desc(&desc, 3 - plain, shape + plain, type, strides + plain),
         "dnnl_memory_desc_create_with_strides");
  return Owned<MemoryDesc>(desc);
}

Owned<MemoryDesc> tagged(int64_t rows, int64_t columns, int type, int tag) {
  const int64_t shape[] = {rows, columns};
  MemoryDesc desc;
  ensure(api().tagged_desc(&desc, 2, shape, type, tag), "dnnl_memory_desc_create_with_tag");
  return Owned<MemoryDesc>(desc);
}

// Our panels [n / 16][k / 16 or 32][16 k or pairs][16 n] as a matrix [k, n]. The number of a tag is the library's word
// alone, so what it stands for is read back.
Owned<MemoryDesc> panels(int64_t k, int64_t n, int type, int tag, std::initializer_list<int64_t> blocks) {
  Owned<MemoryDesc> desc = tagged(k, n, type, tag);
  int count = 0;
  const int64_t *sizes = nullptr, *dims = nullptr;
  ensure(api().desc_query(desc.get(), kQueryInnerCount, &count), "dnnl_memory_desc_query");
  ensure(api().desc_query(desc.get(), kQueryInnerBlocks, &sizes), "dnnl_memory_desc_query");
  ensure(api().desc_query(desc.get(), kQueryInnerDims, &dims), "dnnl_memory_desc_query");
  bool same = count == static_cast<int>(blocks.size());
  for (int i = 0; same && i < count; i++) same = sizes[i] == blocks.begin()[i] && dims[i] == i % 2;  // k n, or k n k
  check(same, ErrorKind::runtime, "oneDNN: format tag ", tag, " of this version is not that of panels of 16 columns");
  return desc;
}

Owned<MemoryDesc> weight_desc(const Product& of) {
  switch (of.weights) {
    case Weights::float32_panels: return panels(of.k, of.n, kFloat32, kPanels16a16b, {16, 16});
    case Weights::bfloat16_panels: return panels(of.k, of.n, kBFloat16, kPanels16a16b2a, {16, 16, 2});
    case Weights::bfloat16_rows:
    case Weights::float16_rows:
      return strided(of.weights, of.k, of.n, round_up(of.n, kPanelColumns), 1,
                     of.weights == Weights::bfloat16_rows ? kBFloat16 : kFloat16);
    case Weights::int8_rows:
    case Weights::decoded_rows: break;
  }
  return strided(of.weights, of.k, of.n, 1, of.k, kInt8);
}

int type_of_x(const Product& of) { return of.weights == Weights::int8_rows ? kInt8 : type_of(of.result); }

Owned<Memory> memory(const Owned<MemoryDesc>& desc, const void* data) {
  Memory made;
  ensure(api().memory_create(&made, desc.get(), runtime().engine, const_cast<void*>(data)), "dnnl_memory_create");
  return Owned<Memory>(made);
}

constexpr int64_t round_up_to_64(std::size_t bytes) { return static_cast<int64_t>((bytes + 63) / 64 * 64); }

}  // namespace

void Matmul::append(PostOps chain, int algorithm, int64_t rows, int64_t columns, int type,
                    const void* (*operand)(const Operands&)) {
  PostOp& post_op = post_ops_[static_cast<std::size_t>(post_op_count_++)];
  post_op = {strided(product_.weights, rows, columns, columns, 1, type), operand};
  ensure(api().append_binary(chain, algorithm, post_op.desc.get()), "dnnl_post_ops_append_binary");
}

// What csrc/cpu/linear/epilogue.hpp does, in its order. All of it is float32.
Owned<PostOps> Matmul::post_ops() {
  PostOps made;
  ensure(api().post_ops_create(&made), "dnnl_post_ops_create");
  Owned<PostOps> chain(made);
  const auto binary = [&](int algorithm, int64_t rows, int64_t columns, int type, auto operand) {
    append(chain.get(), algorithm, rows, columns, type, operand);
  };
  const Product& of = product_;
  if (of.weights == Weights::int8_rows)
    binary(kBinaryMul, of.m, 1, kFloat32, [](const Operands& o) -> const void* { return o.row_scale; });
  if (of.weights >= Weights::int8_rows && !of.group_size)
    binary(kBinaryMul, 1, of.n, kFloat32, [](const Operands& o) -> const void* { return o.column_scale; });
  if (of.bias) binary(kBinaryAdd, 1, of.n, kFloat32, [](const Operands& o) -> const void* { return o.bias; });
  if (of.activation != Activation::none) {
    const int algorithm = of.activation == Activation::silu ? kSwish : kGeluTanh;  // the others are refused
    ensure(api().append_eltwise(chain.get(), algorithm, 1.0f, 0.0f), "dnnl_post_ops_append_eltwise");
    post_op_count_++;  // it has no second operand
  }
  if (of.mul) binary(kBinaryMul, of.m, of.n, type_of(of.result), [](const Operands& o) { return o.mul; });
  if (of.add) binary(kBinaryAdd, of.m, of.n, type_of(of.result), [](const Operands& o) { return o.add; });
  return chain;
}

Owned<Attributes> Matmul::attributes() {
  Attributes made;
  ensure(api().attr_create(&made), "dnnl_primitive_attr_create");
  Owned<Attributes> attributes(made);
  ensure(api().set_scratchpad(made, kUserScratchpad), "dnnl_primitive_attr_set_scratchpad_mode");
  if (product_.weights == Weights::decoded_rows) {
    const int mode = product_.result == DType::float32    ? kStrictMath
                     : product_.result == DType::bfloat16 ? kBFloat16Math
                                                          : kFloat16Math;
    ensure(api().set_math_of_codes(made, mode, 1), "dnnl_primitive_attr_set_fpmath_mode_v2");
  } else {  // ONEDNN_DEFAULT_FPMATH_MODE would have float32 rounded to bfloat16
    ensure(api().set_math(made, kStrictMath), "dnnl_primitive_attr_set_fpmath_mode");
  }
  if (product_.group_size) {
    constexpr int kOfBothDimensions = 3;
    const int64_t group[] = {product_.group_size, 1};
    ensure(api().set_scales(made, kWeights, kOfBothDimensions, 2, group, kFloat32), "dnnl_primitive_attr_set_scales");
    const int64_t groups = product_.k / product_.group_size;
    group_scales_ = strided(product_.weights, groups, product_.n, product_.n, 1, kFloat32);
  }
  ensure(api().set_post_ops(made, post_ops().get()), "dnnl_primitive_attr_set_post_ops");
  return attributes;
}

Matmul::Matmul(const Product& product)
    : product_(product),
      x_(strided(product.weights, product.m, product.k, product.k, 1, type_of_x(product))),
      weight_(weight_desc(product)),
      y_(strided(product.weights, product.m, product.n, product.n, 1, type_of(product.result))) {
  if (product.weights == Weights::decoded_rows && !(api().set_math_of_codes && api().set_scales)) {
    reason_ = "this version of oneDNN decodes no weights";
    return;
  }
  const bool reordered = product.weights == Weights::bfloat16_panels && product.m >= kReorderRows;
  const Owned<MemoryDesc> any = reordered ? tagged(product.k, product.n, kBFloat16, kAnyFormat) : nullptr;
  const MemoryDescHandle* const weight = reordered ? any.get() : weight_.get();
  PrimitiveDesc made;
  const int status =
      api().matmul(&made, runtime().engine, x_.get(), weight, nullptr, y_.get(), attributes().get());
  if (status == kUnimplemented) {
    reason_ = "oneDNN has no implementation of this product here";
    return;
  }
  ensure(status, "dnnl_matmul_primitive_desc_create");
  const Owned<PrimitiveDesc> desc(made);
  const char* implementation = "";
  ensure(api().query(desc.get(), kQueryImplementation, 0, &implementation), "dnnl_primitive_desc_query");
  if (std::string_view(implementation).starts_with("ref")) {
    reason_ = concat("oneDNN has only its reference implementation of this product here, ", implementation);
    return;
  }
  if (reordered) {
    read_weight_ = copy_of(desc.get(), kQueryWeights);
    PrimitiveDesc reorder;
    ensure(api().reorder(&reorder, weight_.get(), runtime().engine, read_weight_.get(), runtime().engine, nullptr),
           "dnnl_reorder_primitive_desc_create");
    const Owned<PrimitiveDesc> reorder_desc(reorder);
    reorder_ = primitive(reorder_desc.get());
    weight_bytes_ = round_up_to_64(api().desc_bytes(read_weight_.get()));
  }
  matmul_ = primitive(desc.get());
  scratchpad_ = copy_of(desc.get(), kQueryScratchpad);
  scratchpad_bytes_ = round_up_to_64(api().desc_bytes(scratchpad_.get()));
}

void Matmul::run(const Operands& operands, void* room) const {
  Stream made;
  ensure(api().stream_create(&made, runtime().engine, kInOrder), "dnnl_stream_create");
  const Owned<Stream> stream(made);
  Owned<Memory> weight = memory(weight_, operands.weight);
  if (reorder_) {
    Owned<Memory> blocks = memory(read_weight_, room);
    const Argument arguments[] = {{kSource, weight.get()}, {kDestination, blocks.get()}};
    ensure(api().execute(reorder_.get(), stream.get(), 2, arguments), "dnnl_primitive_execute");
    weight = std::move(blocks);
  }
  const Owned<Memory> x = memory(x_, operands.x), y = memory(y_, operands.y),
                      scratchpad = memory(scratchpad_, static_cast<char*>(room) + weight_bytes_);
  std::array<Argument, 5 + kMostPostOps> arguments{
      {{kSource, x.get()}, {kWeights, weight.get()}, {kDestination, y.get()}, {kScratchpad, scratchpad.get()}}};
  std::array<Owned<Memory>, kMostPostOps> seconds;
  int count = 4;
  const Owned<Memory> group_scales = group_scales_ ? memory(group_scales_, operands.column_scale) : nullptr;
  if (group_scales) arguments[static_cast<std::size_t>(count++)] = {kScalesOfWeights, group_scales.get()};
  for (int i = 0; i < post_op_count_; i++) {
    const auto at = static_cast<std::size_t>(i);
    if (!post_ops_[at].desc) continue;
    seconds[at] = memory(post_ops_[at].desc, post_ops_[at].operand(operands));
    arguments[static_cast<std::size_t>(count++)] = {argument_of_post_op(i), seconds[at].get()};
  }
  ensure(api().execute(matmul_.get(), stream.get(), count, arguments.data()), "dnnl_primitive_execute");
  ensure(api().stream_wait(stream.get()), "dnnl_stream_wait");
}

namespace {
thread_local Kept<Product, Matmul> kept;
}  // namespace

std::shared_ptr<const Matmul> matmul(const Product& product) { return kept.find(product); }
std::size_t kept_primitives() { return kept.size(); }

}  // namespace lowbit::onednn
