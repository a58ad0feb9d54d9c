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

int64_t uid(AttentionShape::Tensor tensor) { return tensor + 1; }  // 0 is cuDNN's for none

void ensure(fe::error_t status) {
  if (status.is_bad()) throw Error(ErrorKind::runtime, status.get_message());
}

fe::DataType_t type_of(DType dtype) {
  return dtype == DType::float32   ? fe::DataType_t::FLOAT
         : dtype == DType::float16 ? fe::DataType_t::HALF
                                   : fe::DataType_t::BFLOAT16;
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
  fe::DataType_t type(AttentionShape::Tensor which) const {
    using enum AttentionShape::Tensor;
    return which == lse ? fe::DataType_t::FLOAT : type_of(which == bias ? shape_.bias_dtype : shape_.dtype);
  }
  fe::graph::Tensor_attributes attributes(AttentionShape::Tensor which) const {
    const std::array<int64_t, 4> size = shape_.sizes(which), stride = shape_.strides(which);
    return fe::graph::Tensor_attributes()
        .set_uid(uid(which))
        .set_data_type(type(which))
        .set_dim({size.begin(), size.end()})
        .set_stride({stride.begin(), stride.end()});
  }
  Tensor input(AttentionShape::Tensor which) { return graph_->tensor(attributes(which)); }
  void output(const Tensor& tensor, AttentionShape::Tensor which) {
    const fe::graph::Tensor_attributes wanted = attributes(which);
    tensor->set_output(true).set_uid(uid(which)).set_data_type(type(which));
    tensor->set_dim(wanted.get_dim()).set_stride(wanted.get_stride());
  }
  template <class Attributes>
  void describe_scores(Attributes& scores) {
    scores.set_attn_scale(shape_.scale);
    if (shape_.bias_dtype != DType::other) scores.set_bias(input(AttentionShape::bias));
    if (shape_.causal || shape_.window)
      scores.set_diagonal_alignment(shape_.ends_together ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                         : fe::DiagonalAlignment_t::TOP_LEFT);
    if (shape_.causal) scores.set_diagonal_band_right_bound(0);
    if (shape_.window) scores.set_diagonal_band_left_bound(shape_.window);
  }

  void forward() {
    using enum AttentionShape::Tensor;
    auto scores = fe::graph::SDPA_attributes().set_name("attention_forward").set_generate_stats(shape_.has_lse);
    describe_scores(scores);
    auto [result, statistics] = graph_->sdpa(input(q), input(k), input(v), scores);
    output(result, out);
    if (shape_.has_lse) output(statistics, lse);
  }
  void backward() {
    using enum AttentionShape::Tensor;
    auto scores = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
    describe_scores(scores);
    auto [of_q, of_k, of_v] =
        graph_->sdpa_backward(input(q), input(k), input(v), input(out), input(grad_out), input(lse), scores);
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
  for (const int64_t number : graph->get_variant_pack_uids_sorted()) {
    check(number > 0 && number <= AttentionShape::kTensors, ErrorKind::runtime, "it has a tensor of its own, ", number);
    plan.tensors.push_back(static_cast<AttentionShape::Tensor>(number - 1));
  }
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

void run_plan(const Plan& plan, CudnnHandle handle, const AttentionTensors& tensors, void* workspace) {
  AttentionTensors given{};
  for (std::size_t i = 0; i < plan.tensors.size(); i++) given[i] = tensors[plan.tensors[i]];
  ensure(static_cast<const Graph*>(plan.graph.get())
             ->execute(native(handle), given.data(), static_cast<int>(plan.tensors.size()), workspace));
}

}  // namespace lowbit::cuda
