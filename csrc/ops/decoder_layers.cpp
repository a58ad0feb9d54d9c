// SPDX-License-Identifier: Apache-2.0
#include "ops/decoder_layers.hpp"

#include <utility>

#include "core/bits.hpp"
#include "core/parallel.hpp"
#include "ops/checks.hpp"
#include "ops/preferred_row.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

constexpr std::string_view kDecoderLayers = "decoder_layers";

int64_t columns_of(const std::vector<DecoderLayer::Linear>& products) {
  int64_t columns = 0;
  for (const auto& linear : products) columns += linear.spec.n;
  return columns;
}

int64_t bytes_of_columns(const TensorView& x, int64_t columns) {  // with as many rows as x
  return x.size(0) * x.size(1) * columns * static_cast<int64_t>(size_of(x.dtype));
}

// Hands out places in memory, or only counts. Not Arena: its red zones are set when a place is given, and here all
// places are given before the first call, the same ones to both halves of every layer.
struct Places {
  char* base = nullptr;
  int64_t bytes = 0;
  char* take(int64_t count) {
    const int64_t at = std::exchange(bytes, round_up(bytes + count, 64));
    return base ? base + at : nullptr;
  }
};

class DecoderInCalls {
 public:
  DecoderInCalls(const DecoderLayersArgs& args, std::span<char> memory)
      : args_(args), memory_(memory), places_{memory.data()} {}

  DecoderCalls all() {
    const int64_t columns = args_.x.size(-1);
    const TensorView h = fresh(columns), streams[] = {fresh(columns), fresh(columns)};
    const Places begin = places_;  // each half of a layer lies where the one before it lay
    made_.calls.reserve(args_.layers.size() * 13);
    TensorView x = args_.x;
    for (std::size_t i = 0; i < args_.layers.size(); i++) {
      const bool last = i + 1 == args_.layers.size();
      const TensorView y = last ? args_.y : streams[i % 2];
      add_layer(args_.layers[i], begin, x, h, y);
      x = y;
    }
    return std::move(made_);
  }

 private:
  void add_layer(const DecoderLayer& layer, const Places& begin, const TensorView& x, const TensorView& h,
                 const TensorView& y) {
    const std::size_t second = layer.norms.size() / 2;
    places_ = begin;
    add_branch(layer, layer.o, 1, attended(layer, normed(layer, 0, x)), x, h);
    places_ = begin;
    add_branch(layer, layer.down, 3, gated(layer, normed(layer, second, h)), h, y);
  }

  TensorView normed(const DecoderLayer& layer, std::size_t norm, const TensorView& x) {
    return norm_into(fresh(x.size(-1)), layer.norms[norm], x, {});
  }

  // y = add + linear(x), with a norm between them in a layer of four.
  void add_branch(const DecoderLayer& layer, const DecoderLayer::Linear& linear, std::size_t norm, const TensorView& x,
                  const TensorView& add, const TensorView& y) {
    if (layer.norms.size() == 2) product_into(y, linear, x, {.add = add});
    else norm_into(y, layer.norms[norm], product_into(fresh(linear.spec.n), linear, x, {}), add);
  }

  // [B, L, Hq E]
  TensorView attended(const DecoderLayer& layer, const TensorView& x) {
    const TensorView qkv = projected(layer, x);
    const int64_t batch = x.size(0), length = x.size(1), e = layer.keys.rank == 4 ? layer.keys.size(3) : 0;
    check(e > 0 && qkv.size(-1) % e == 0, value, kDecoderLayers,
          ": the outputs of qkv must be heads of E, the last dimension of keys [B, Hkv, S, E], got ", qkv.size(-1),
          " outputs and keys of shape ", shape_text(layer.keys));
    RopeAppendArgs heads{.qkv = shaped(qkv, {batch, length, qkv.size(-1) / e, e}),
                         .cos = args_.cos, .sin = args_.sin,
                         .q_weight = layer.q_weight, .k_weight = layer.k_weight,
                         .eps = args_.heads_eps, .offset = args_.heads_offset,
                         .start = args_.start, .keys = layer.keys, .values = layer.values,
                         .rotated = {}};
    check_args(heads);
    const int64_t columns = heads.heads() * e;
    heads.rotated = shaped(fresh(columns), {batch, heads.heads(), length, e});
    made_.calls.push_back(heads);
    const TensorView result = fresh(columns);
    attend(heads, result);
    return result;
  }

  // [B, L, (Hq + 2 Hkv) E]. Where there is one row, each projection can write its part of it.
  TensorView projected(const DecoderLayer& layer, const TensorView& x) {
    check(layer.qkv.size() == 1 || x.numel() == x.size(-1), value, kDecoderLayers,
          ": x must have one row where q, k and v are products of their own, got ", shape_text(x));
    const TensorView qkv = fresh(columns_of(layer.qkv));
    TensorView part = qkv;
    for (const auto& linear : layer.qkv) {
      product_into(shaped(part, {x.size(0), x.size(1), linear.spec.n}), linear, x, {});
      if (part.data) part.data = part.as<char>() + linear.spec.n * static_cast<int64_t>(size_of(part.dtype));
    }
    return qkv;
  }

  void attend(const RopeAppendArgs& heads, const TensorView& result) {
    AttentionForwardArgs attention{.q = heads.rotated, .k = heads.keys, .v = heads.values};
    attention.k.shape[2] = attention.v.shape[2] = heads.start + heads.tokens();
    attention.out = shaped(result, {heads.batch(), heads.tokens(), heads.heads(), heads.e()});
    std::swap(attention.out.shape[1], attention.out.shape[2]);  // [B, Hq, L, E], in memory as the next product reads it
    std::swap(attention.out.stride[1], attention.out.stride[2]);
    attention.mask = stretched(args_.mask, attention.q, attention.k);
    attention.causal = args_.causal, attention.scale = args_.scale, attention.score_mod = args_.score_mod;
    check_args(attention);
    made_.calls.push_back(attention);
  }

  // [B, L, n]
  TensorView gated(const DecoderLayer& layer, const TensorView& x) {
    const TensorView gate = product_into(fresh(layer.gate.spec.n), layer.gate, x, {.activation = args_.activation});
    return product_into(fresh(layer.up.spec.n), layer.up, x, {.mul = gate});
  }

  struct PostOps {
    int64_t activation = 0;
    TensorView mul{}, add{};
  };
  TensorView product_into(const TensorView& y, const DecoderLayer::Linear& linear, const TensorView& x,
                          const PostOps& post) {
    const LinearTensors tensors{x, linear.weight, linear.bias, post.mul, post.add, y};
    made_.calls.push_back(DecoderCalls::Product{
        linear_args(tensors, linear.spec, linear.x_format, post.activation), linear.row});
    return y;
  }

  TensorView norm_into(const TensorView& y, const TensorView& weight, const TensorView& x, const TensorView& add) {
    RmsNormArgs call = rms_norm_args(x, weight, args_.eps, args_.offset, add);
    call.y = y;
    made_.calls.push_back(call);
    return y;
  }

  TensorView fresh(int64_t columns) {  // [B, L, columns]
    TensorView view = args_.x;
    view.data = places_.take(bytes_of_columns(view, columns));
    check(!view.data || places_.bytes <= static_cast<int64_t>(memory_.size()), value, kDecoderLayers,
          ": memory must have decoder_bytes, got ", memory_.size());
    return shaped(view, {view.size(0), view.size(1), columns});
  }

  static TensorView shaped(TensorView view, std::initializer_list<int64_t> shape) {  // dense
    view.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), view.shape.begin());
    int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; i--) view.stride[i] = std::exchange(stride, stride * view.shape[i]);
    return view;
  }

  const DecoderLayersArgs& args_;
  std::span<char> memory_;
  Places places_;
  DecoderCalls made_;
};

}  // namespace

// As DecoderInCalls takes it.
int64_t decoder_bytes(const DecoderLayersArgs& args) {
  const TensorView& x = args.x;
  const auto end_of = [&x](int64_t begin, std::initializer_list<int64_t> columns) {
    Places places{nullptr, begin};
    for (const int64_t count : columns) places.take(bytes_of_columns(x, count));
    return places.bytes;
  };
  const int64_t k = x.size(-1), begin = end_of(0, {k, k, k});
  int64_t bytes = begin;
  for (const DecoderLayer& layer : args.layers) {
    const int64_t heads = layer.o.spec.k;
    bytes = std::max({bytes, end_of(begin, {k, columns_of(layer.qkv), heads, heads, layer.o.spec.n}),
                      end_of(begin, {k, layer.gate.spec.n, layer.up.spec.n, layer.down.spec.n})});
  }
  return bytes;
}

DecoderCalls decoder_calls(const DecoderLayersArgs& args, std::span<char> memory) {
  const TensorView& x = args.x;
  check_activation(kDecoderLayers, "x", x);
  check(x.rank == 3, value, kDecoderLayers, ": x must have shape [B, L, k], got ", shape_text(x));
  check_contiguous(kDecoderLayers, "x", x);
  check(!args.layers.empty(), value, kDecoderLayers, ": keys must be those of at least one layer, got none");
  for (const DecoderLayer& layer : args.layers)
    check(layer.norms.size() == 2 || layer.norms.size() == 4, value, kDecoderLayers,
          ": norms must be two weights or four for each layer, got ", layer.norms.size());
  check(!args.causal || args.start == 0, value, kDecoderLayers,
        ": causal must be False behind tokens that are in the cache, got start=", args.start);
  return DecoderInCalls(args, memory).all();
}

void DecoderCalls::run() const {
  as_team([&] {
    for (const auto& call : calls)
      std::visit(
          [](const auto& args) {
            if constexpr (requires { args.row; }) lowbit::run(args.args, args.row);
            else lowbit::run(args);
          },
          call);
  });
}

}  // namespace lowbit
