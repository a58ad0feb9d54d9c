// SPDX-License-Identifier: Apache-2.0
// The only file that includes cudnn-frontend: a shape as its graph, and the graph as a plan. Takes a minute to compile.
#include "cuda/cudnn/plan.hpp"

#include <cudnn_frontend.h>

#include "cuda/runtime/libraries.hpp"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // the library through which cudnn-frontend calls cuDNN
}

namespace lowbit::cuda {
namespace {

namespace fe = cudnn_frontend;
using Graph = fe::graph::Graph;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr int64_t kStatistics = AttentionShape::kTensors;

// Pointers are passed in the order of these numbers: run_plan.
int64_t uid(int64_t tensor) {
  return tensor <= AttentionShape::out ? tensor + 1 : tensor == kStatistics ? AttentionShape::out + 2 : tensor + 2;
}

void ensure(fe::error_t status) {
  if (status.is_bad()) throw Error(ErrorKind::runtime, status.get_message());
}

fe::DataType_t type_of(DType dtype) {
  return dtype == DType::float16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
}

// For a graph without a handle; called before nodes are added, which would otherwise query the CUDA runtime.
void describe_device(Graph& graph, const CudnnDevice& device) {
  auto properties = std::make_shared<fe::DeviceProperties>();
  std::vector<uint8_t> text(device.description.begin(), device.description.end());
  text.push_back(0);
  ensure(properties->deserialize(text));
  graph.set_device_properties(properties).set_sm_version(device.compute_capability);
}

class GraphOf {
 public:
  GraphOf(const AttentionShape& shape, const CudnnDevice& device) : shape_(shape) {
    if (!device.handle) describe_device(*graph_, device);
    graph_->set_io_data_type(type_of(shape.dtype))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    shape.backward ? backward() : forward();
  }
  std::shared_ptr<Graph> take() { return graph_; }

 private:
  fe::graph::Tensor_attributes attributes(AttentionShape::Tensor which) const {
    const std::array<int64_t, 4> size = shape_.sizes(which);
    const std::array<int64_t, 3>& stride = shape_.stride[which];
    return fe::graph::Tensor_attributes()
        .set_uid(uid(which))
        .set_dim({size.begin(), size.end()})
        .set_stride({stride[0], stride[1], stride[2], 1});
  }
  Tensor input(AttentionShape::Tensor which) { return graph_->tensor(attributes(which)); }
  void output(const Tensor& tensor, AttentionShape::Tensor which) {
    const fe::graph::Tensor_attributes wanted = attributes(which);
    tensor->set_output(true).set_uid(uid(which)).set_dim(wanted.get_dim()).set_stride(wanted.get_stride());
  }
  template <class Attributes>
  void describe_lse(Attributes& lse) const {
    const int64_t heads = shape_.heads, length = shape_.q_length;
    lse.set_uid(uid(kStatistics)).set_data_type(fe::DataType_t::FLOAT).set_dim({shape_.batch, heads, length, 1});
    lse.set_stride({heads * length, length, 1, 1});
  }
  template <class Attributes>
  void describe_scores(Attributes& scores) const {
    scores.set_attn_scale(shape_.scale);
    if (!shape_.causal) return;
    scores.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  }

  void forward() {
    using enum AttentionShape::Tensor;
    auto scores = fe::graph::SDPA_attributes().set_name("attention_forward").set_generate_stats(true);
    describe_scores(scores);
    auto [result, statistics] = graph_->sdpa(input(q), input(k), input(v), scores);
    output(result, out);
    describe_lse(statistics->set_output(true));
  }
  void backward() {
    using enum AttentionShape::Tensor;
    auto scores = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
    describe_scores(scores);
    fe::graph::Tensor_attributes statistics;
    describe_lse(statistics);
    auto [of_q, of_k, of_v] = graph_->sdpa_backward(input(q), input(k), input(v), input(out), input(grad_out),
                                                    graph_->tensor(statistics), scores);
    output(of_q, grad_q), output(of_k, grad_k), output(of_v, grad_v);
  }

  const AttentionShape& shape_;
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
};

void open_cudnn() { fe::cudnn_dlhandle = library(LibraryName::cudnn).handle; }

cudnnHandle_t native(CudnnHandle handle) { return reinterpret_cast<cudnnHandle_t>(handle); }

Plan finished(std::shared_ptr<Graph> graph) {
  Plan plan;
  ensure(graph->get_workspace_size(plan.workspace));
  plan.graph = std::move(graph);
  return plan;
}

// Turns cuDNN's refusals into reasons, and its exceptions too: it throws if a library that it needs is missing.
template <class Make>
Plan plan_or_reason(Make&& make) {
  try {
    open_cudnn();
    return make();
  } catch (const std::exception& error) {  // the first line; the others concern its engines
    const std::string_view words = error.what();
    return {.graph = nullptr, .refused = concat("cuDNN: ", words.substr(0, words.find('\n')))};
  }
}

}  // namespace

bool has_cudnn_frontend() { return true; }

Plan make_plan(const AttentionShape& shape, const CudnnDevice& device) {
  return plan_or_reason([&] {
    std::shared_ptr<Graph> graph = GraphOf(shape, device).take();
    ensure(graph->validate());
    ensure(device.handle ? graph->build_operation_graph(native(device.handle)) : graph->build_operation_graph());
    ensure(graph->create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}));
    graph->deselect_workspace_greater_than(max_workspace(shape));
    ensure(graph->check_support());
    ensure(graph->build_plans());
    const std::vector<int64_t> given = graph->get_variant_pack_uids_sorted();
    for (std::size_t i = 0; i < given.size(); i++)
      check(given[i] == static_cast<int64_t>(i) + 1, ErrorKind::runtime, "its tensors are numbered in another way");
    return finished(std::move(graph));
  });
}

std::string image_of(const Plan& plan) {
  std::vector<uint8_t> image;
  ensure(static_cast<const Graph*>(plan.graph.get())->serialize(image));
  return {image.begin(), image.end()};
}

Plan read_plan(const std::string& image, const CudnnDevice& device) {
  return plan_or_reason([&] {
    auto graph = std::make_shared<Graph>();
    const std::vector<uint8_t> bytes(image.begin(), image.end());
    if (!device.handle) describe_device(*graph, device);
    ensure(device.handle ? graph->deserialize(native(device.handle), bytes) : graph->deserialize(bytes));
    return finished(std::move(graph));
  });
}

void run_plan(const Plan& plan, CudnnHandle handle, std::span<void*> tensors, void* workspace) {
  ensure(static_cast<const Graph*>(plan.graph.get())
             ->execute(native(handle), tensors.data(), static_cast<int>(tensors.size()), workspace));
}

}  // namespace lowbit::cuda
