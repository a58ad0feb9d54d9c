// SPDX-License-Identifier: Apache-2.0
#include "onednn/sdpa.hpp"

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "onednn/kept.hpp"

namespace lowbit::onednn {
namespace {

LogicalTensor tensor(std::size_t id, int type, std::initializer_list<int64_t> dims,
                     std::initializer_list<int64_t> strides) {
  LogicalTensor made{.id = id, .rank = static_cast<int>(dims.size()), .dims = {}, .type = type, .property = kVariable,
                     .layout = kStridedLayout, .strides = {}};
  std::copy(dims.begin(), dims.end(), made.dims), std::copy(strides.begin(), strides.end(), made.strides);
  return made;
}

// A status of the library that is not 0, and the function that had it: why there is no such partition.
struct Refusal {
  const char* function;
  int status;
};
void want(int status, const char* function) {
  if (status) throw Refusal{function, status};
}

template <class Handle>
using Closed = std::unique_ptr<std::remove_pointer_t<Handle>, int (*)(Handle)>;

// A graph with its ops, which it takes by reference.
class Builder {
 public:
  Builder() { want(api().graph_create(&graph_, kCpu), "dnnl_graph_graph_create"); }
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;
  ~Builder() {
    for (GraphOp op : ops_) api().graph_op_destroy(op);
    api().graph_destroy(graph_);
  }

  GraphOp op(int kind, const char* name, std::initializer_list<const LogicalTensor*> inputs,
             std::initializer_list<const LogicalTensor*> outputs) {
    GraphOp made;
    want(api().graph_op_create(&made, 100 + ops_.size(), kind, name), "dnnl_graph_op_create");
    ops_.push_back(made);
    for (const LogicalTensor* input : inputs) want(api().graph_op_input(made, input), "dnnl_graph_op_add_input");
    for (const LogicalTensor* output : outputs) want(api().graph_op_output(made, output), "dnnl_graph_op_add_output");
    return made;
  }

  // All ops as one partition.
  Partition partition() {
    for (GraphOp op : ops_) want(api().graph_add(graph_, op), "dnnl_graph_add_op");
    want(api().graph_finalize(graph_), "dnnl_graph_graph_finalize");
    want(api().graph_filter(graph_, kFusion), "dnnl_graph_graph_filter");
    std::size_t count = 0;
    want(api().graph_partition_count(graph_, &count), "dnnl_graph_graph_get_partition_num");
    if (count != 1) return nullptr;
    Partition found;
    want(api().graph_partitions(graph_, 1, &found), "dnnl_graph_graph_get_partitions");
    return found;
  }

 private:
  Graph graph_;
  std::vector<GraphOp> ops_;
};

}  // namespace

// softmax(scale q k^T + mask) v, rows that see nothing 0; scores are float32.
std::string Sdpa::compile(const Attention& of) {
  const int64_t l = of.q_length, s = of.kv_length, b = of.batch, h = of.kv_heads, g = of.group;
  const auto queries = [&](std::size_t id, int type, int64_t columns, const Attention::Strides& at) {
    return tensor(id, type, {b, h, g, l, columns}, {at[0], at[1] * g, at[1], at[2], 1});
  };
  const auto keys = [&](std::size_t id, int64_t columns, const Attention::Strides& at) {
    return tensor(id, type_of(of.dtype), {b, h, 1, s, columns}, {at[0], at[1], at[1], at[2], 1});
  };
  const Attention::Strides of_scores{h * g * l * s, l * s, s};
  const auto scores = [&](std::size_t id, int type) { return queries(id, type, s, of_scores); };
  const int type = type_of(of.dtype);
  q_ = queries(0, type, of.e, of.q), k_ = keys(1, of.e, of.k), v_ = keys(2, of.ev, of.v);
  scale_ = tensor(3, kFloat32, {1}, {1});
  const int64_t heads = of.mask_heads ? h * g : 1, kv_heads = of.mask_heads ? h : 1, group = of.mask_heads ? g : 1;
  mask_ = tensor(4, kFloat32, {of.mask_batch ? b : 1, kv_heads, group, l, s},
                 {heads * l * s, group * l * s, l * s, s, 1});
  out_ = queries(5, type, of.ev, of.out), lse_ = queries(6, kFloat32, 1, {h * g * l, l, 1});
  const LogicalTensor score = scores(7, kFloat32), scaled = scores(8, kFloat32), masked = scores(9, kFloat32),
                      probabilities = scores(10, type);

  Builder graph;
  const uint8_t yes = 1;
  const int64_t last = -1;
  GraphOp op = graph.op(kGraphMatmul, "scores", {&q_, &k_}, {&score});
  want(api().graph_op_bool(op, kAttributeTransposeB, &yes, 1), "dnnl_graph_op_set_attr_bool");
  graph.op(kGraphMultiply, "scale", {&score, &scale_}, {&scaled});
  if (of.has_mask) graph.op(kGraphAdd, "mask", {&scaled, &mask_}, {&masked});
  op = graph.op(kGraphSoftmax, "softmax", {of.has_mask ? &masked : &scaled}, {&probabilities, &lse_});
  want(api().graph_op_int(op, kAttributeAxis, &last, 1), "dnnl_graph_op_set_attr_s64");
  want(api().graph_op_text(op, kAttributeMode, "inf_as_zero", 11), "dnnl_graph_op_set_attr_str");
  graph.op(kGraphMatmul, "values", {&probabilities, &v_}, {&out_});

  const Closed<Partition> partition(graph.partition(), api().partition_destroy);
  if (!partition) return "oneDNN does not fuse this attention";
  uint8_t supported = 0;
  want(api().partition_is_supported(partition.get(), &supported), "dnnl_graph_partition_is_supported");
  if (!supported) return "oneDNN has no implementation of this attention here";
  CompiledPartition made;
  want(api().compiled_create(&made, partition.get()), "dnnl_graph_compiled_partition_create");
  compiled_.reset(made);
  const LogicalTensor *inputs[] = {&q_, &k_, &scale_, &v_, &mask_}, *outputs[] = {&out_, &lse_};
  want(api().partition_compile(partition.get(), made, 4 + has_mask_, inputs, 2, outputs, runtime().engine),
       "dnnl_graph_partition_compile");
  return "";
}

Sdpa::Sdpa(const Attention& attention) : has_mask_(attention.has_mask) {
#define LOWBIT_IS_THERE(name, symbol, ...) && api().name
  const bool has_graphs = true LOWBIT_ONEDNN_GRAPH_FUNCTIONS(LOWBIT_IS_THERE);
#undef LOWBIT_IS_THERE
  if (!has_graphs) {
    reason_ = "this oneDNN has no graph API";
    return;
  }
  try {
    reason_ = compile(attention);
  } catch (const Refusal& refusal) {
    reason_ = concat("oneDNN refuses this attention: ", refusal.function, " gives ", refusal.status);
  }
}

void Sdpa::run(const AttentionOperands& of) const {
  std::vector<Closed<GraphTensor>> made;
  made.reserve(7);
  const auto handle = [&](const LogicalTensor& as, const void* data) {
    GraphTensor one;
    ensure(api().graph_tensor_create(&one, &as, runtime().engine, const_cast<void*>(data)),
           "dnnl_graph_tensor_create");
    made.emplace_back(one, api().graph_tensor_destroy);
    return one;
  };
  const GraphTensor inputs[] = {handle(q_, of.q), handle(k_, of.k), handle(scale_, of.scale), handle(v_, of.v),
                                has_mask_ ? handle(mask_, of.mask) : nullptr},
                    outputs[] = {handle(out_, of.out), handle(lse_, of.lse)};
  Stream stream;
  ensure(api().stream_create(&stream, runtime().engine, kInOrder), "dnnl_stream_create");
  const Closed<Stream> open(stream, api().stream_destroy);
  ensure(api().compiled_execute(compiled_.get(), stream, 4 + has_mask_, inputs, 2, outputs),
         "dnnl_graph_compiled_partition_execute");
  ensure(api().stream_wait(stream), "dnnl_stream_wait");
}

namespace {
thread_local Kept<Attention, Sdpa> kept;
}  // namespace

std::shared_ptr<const Sdpa> sdpa(const Attention& attention) { return kept.find(attention); }

}  // namespace lowbit::onednn
