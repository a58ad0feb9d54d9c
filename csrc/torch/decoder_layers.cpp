// SPDX-License-Identifier: Apache-2.0
#include "ops/decoder_layers.hpp"

#include "ops/attention_mods.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

// The layers of a call, one behind the other in each list: keys and values, one of each; norms, two or four;
// head_norms, none or two; weights, of the products of qkv (one, or three), o, gate, up and down, each with its bias
// behind it where it has one; linears, the number of products of qkv, then eight numbers for each product (n, k,
// format, group_size, asymmetric, x_format, row, whether it has a bias).
struct DecoderLayers {
  static constexpr Text schema =
      "decoder_layers_(Tensor x, Tensor cos, Tensor sin, Tensor(a!)[] keys, Tensor(b!)[] values, SymInt start, "
      "Tensor? mask, bool causal, float scale, int[] score_mod, Tensor[] norms, float eps, float offset, "
      "Tensor[] weights, int[] linears, int activation, Tensor[] head_norms, float heads_eps, float heads_offset) "
      "-> Tensor";
  static constexpr std::size_t kNumbers = 8;

  // One of the lists, of which each layer takes the next.
  template <class Held>
  struct Next {
    std::string_view op, name;
    std::vector<Held> held;
    std::size_t next = 0;

    Held& take() {
      check(next < held.size(), ErrorKind::value, op, ": ", name, " must have more for this number of layers, got ",
            held.size());
      return held[next++];
    }
    void end() const {
      check(next == held.size(), ErrorKind::value, op, ": ", name, " must be ", next,
            " for this number of layers, got ", held.size());
    }
  };
  template <Text name, class Given>
  static auto tensors(Given& given) {
    auto list = get<name>(given).tensors(given.op);
    return Next<typename std::remove_cvref_t<decltype(list)>::value_type>{
        given.op, name, {std::make_move_iterator(list.begin()), std::make_move_iterator(list.end())}};
  }

  // Takes the tensors that the views of `args` point into.
  template <class Given>
  struct Call {
    explicit Call(Given& given)
        : keys(tensors<"keys">(given)), values(tensors<"values">(given)), norms(tensors<"norms">(given)),
          weights(tensors<"weights">(given)), head_norms(tensors<"head_norms">(given)),
          linears{given.op, "linears", integers<"linears">(given)}, score_code(integers<"score_mod">(given)),
          mods(given.op, {score_code, {}}, {}) {
      args.x = contiguous_view<"x">(given);
      args.eps = get<"eps">(given), args.offset = get<"offset">(given);
      args.activation = get<"activation">(given);
      args.cos = dense_view<"cos">(given), args.sin = dense_view<"sin">(given);
      args.heads_eps = get<"heads_eps">(given), args.heads_offset = get<"heads_offset">(given);
      args.start = get<"start">(given);
      args.mask = view<"mask">(given);
      args.causal = get<"causal">(given), args.scale = get<"scale">(given), args.score_mod = mods.score_mod();
      args.y = contiguous_like(args.x, args.x.dtype);
      args.layers.resize(keys.held.size());
      if (args.layers.empty()) return;  // refused by the op
      check(norms.held.size() % args.layers.size() == 0, ErrorKind::value, given.op,
            ": norms must be two weights or four for each of ", args.layers.size(), " layers, got ", norms.held.size());
      for (DecoderLayer& layer : args.layers) take(layer);
      keys.end(), values.end(), norms.end(), weights.end(), head_norms.end(), linears.end();
    }

    void take(DecoderLayer& layer) {
      constexpr std::string_view op = Given::op;
      layer.keys = keys.take().written_view(op, "keys"), layer.values = values.take().written_view(op, "values");
      for (std::size_t i = 0; i < norms.held.size() / args.layers.size(); i++)
        layer.norms.push_back(norms.take().contiguous_view(op, "norms"));
      if (!head_norms.held.empty())
        for (TensorView* weight : {&layer.q_weight, &layer.k_weight})
          *weight = head_norms.take().contiguous_view(op, "head_norms");
      const int64_t products = linears.take();
      check(products == 1 || products == 3, ErrorKind::value, op,
            ": linears must begin with 1 or 3 products of qkv, got ", products);
      layer.qkv.resize(static_cast<std::size_t>(products));
      for (auto& linear : layer.qkv) take(linear);
      for (auto* linear : {&layer.o, &layer.gate, &layer.up, &layer.down}) take(*linear);
    }

    void take(DecoderLayer::Linear& linear) {
      constexpr std::string_view op = Given::op;
      int64_t number[kNumbers];
      for (int64_t& it : number) it = linears.take();
      const auto [n, k, format, group_size, asymmetric, x_format, row, has_bias] = number;
      linear.spec = weight_spec(op, n, k, format, group_size, asymmetric != 0);
      linear.x_format = x_format, linear.row = row;
      linear.weight = weights.take().view(op, "weights");
      if (has_bias) linear.bias = weights.take().contiguous_view(op, "weights");
    }

    decltype(tensors<"keys">(std::declval<Given&>())) keys, values, norms, weights, head_norms;
    Next<int64_t> linears;
    std::vector<int64_t> score_code;
    AttentionMods mods;
    DecoderLayersArgs args;
  };

  template <class Given>
  static DecoderCalls args_of(Given& given) { return decoder_calls(Call<Given>(given).args, {}); }

  static Tensor run(Arguments<DecoderLayers>& given) {
    Call call(given);
    DecoderLayersArgs& args = call.args;
    if (args.x.numel() == 0 || args.x.rank != 3) {
      decoder_calls(args, {});  // throws if something is wrong
      return Tensor::empty(given.op, args.y);
    }
    const int64_t bytes = decoder_bytes(args);
    TensorView memory = torch::contiguous_view(args.x.device, DType::uint8, 1, &bytes);
    const Tensor kept = Tensor::empty(given.op, memory);
    Tensor y = Tensor::empty(given.op, args.y);
    decoder_calls(args, {memory.as<char>(), static_cast<std::size_t>(bytes)}).run();
    return y;
  }
};

}  // namespace

const RegisteredOp decoder_layers_op = registered<DecoderLayers>();

}  // namespace lowbit::torch
