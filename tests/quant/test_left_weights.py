# SPDX-License-Identifier: Apache-2.0
"""Weights in no nn.Linear: Conv1D of transformers is quantized, the rest is said in the report with its size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant import QuantLinear


def gpt2(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=2, n_head=4, **changes)
    return transformers.GPT2LMHeadModel(config).eval()


class Experts(nn.Module):
    """Experts of an MoE as one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 64))
        self.bias = nn.Parameter(torch.zeros(64))


def test_conv1d_of_gpt2_becomes_a_quant_linear_with_the_transposed_weight(config):
    model = gpt2()
    ids = torch.randint(0, 97, (2, 9))
    layer = model.transformer.h[0].attn.c_attn
    weight, bias = layer.weight.detach().clone(), layer.bias
    with torch.no_grad():
        wanted = model(ids).logits
        report = lowbit.quantize_(model, config)
        y = model(ids).logits
    assert isinstance(layer, QuantLinear) and (layer.in_features, layer.out_features) == (48, 144) and layer.bias is bias
    table = isinstance(model.transformer.wte, lowbit.QuantEmbedding)  # with 8 bits, as the head of fewer has
    assert len(report.quantized) == 9 + table and not report.skipped
    spec = layer.spec
    assert torch.equal(layer.weight, QuantLinear.from_linear(_linear(weight.T, bias), spec).weight)
    assert (y - wanted).norm() < 0.25 * wanted.norm()
    row = next(row for row in report.rows if row.layer == "transformer.h.0.attn.c_attn")
    assert row.shape == (144, 48) and row.bytes_before == weight.nbytes


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


def test_a_filter_may_leave_conv1d_and_the_report_says_so():
    model = gpt2()
    report = lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, name: isinstance(module, nn.Linear))
    assert [row.layer for row in report.quantized] == ["lm_head"]
    assert {row.note for row in report.skipped} == {"not selected by filter_fn"} and len(report.skipped) == 8


def test_conv1d_generates_trains_and_copies_as_before():
    model = gpt2()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    ids = torch.randint(0, 97, (1, 5))
    assert model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (1, 9)
    model(ids, labels=ids).loss.backward()
    assert model.transformer.wpe.weight.grad.isfinite().all()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


def test_a_conv1d_with_nan_or_an_odd_shape_is_refused_by_name():
    model = gpt2()
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="weight of transformer.h.1.mlp.c_fc must be finite"):
        lowbit.quantize_(model, lowbit.int8_weight_only())
    model = gpt2()
    model.transformer.h[1].mlp.c_fc.weight = nn.Parameter(torch.zeros(192, 48))
    with pytest.raises(ValueError, match=r"c_fc must have shape \[48, 192\], got \[192, 48\]"):
        lowbit.quantize_(model, lowbit.int8_weight_only())


def test_another_class_named_conv1d_is_left_and_reported():
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nf, self.nx, self.weight = 8, 4, nn.Parameter(torch.zeros(4, 8))

    report = lowbit.quantize_(nn.Sequential(Conv1D(), nn.Linear(4, 16)), lowbit.int8_weight_only())
    assert [(weight.name, weight.kind) for weight in report.left] == [("0.weight", "Conv1D")]


def test_weights_in_no_linear_layer_are_said_with_their_size():
    model = nn.ModuleDict({
        "embed": nn.Embedding(500, 64), "positions": nn.Embedding(20, 64), "experts": Experts(), "conv": nn.Conv2d(3, 8, 3),
        "norm": nn.LayerNorm(64), "attention": nn.MultiheadAttention(64, 2), "fc": nn.Linear(64, 64),
    })  # fmt: skip
    report = lowbit.quantize_(model, lowbit.int8_weight_only())
    assert [(weight.name, weight.bytes) for weight in report.left] == [
        ("embed.weight", 128000), ("positions.weight", 5120), ("experts.gate_up_proj", 32768), ("conv.weight", 864), ("attention.in_proj_weight", 49152),
    ]  # fmt: skip
    text = repr(report)
    assert "stays float: 133.12 kB in Embedding, no linear layer: embed.weight [500, 64], positions.weight [20, 64]" in text
    assert "stays float: 32.77 kB in Experts, no linear layer: experts.gate_up_proj [4, 32, 64]" in text
    assert text.index("Embedding") < text.index("MultiheadAttention,") < text.index("Experts")
    assert "experts.gate_up_proj" in report._repr_html_()
    assert report.to_dict()["left"][2] == {"name": "experts.gate_up_proj", "kind": "Experts", "shape": [4, 32, 64], "bytes": 32768, "packable": False}


def test_a_weight_shared_by_many_is_said_once_and_many_are_counted():
    model = nn.ModuleList([nn.Embedding(10, 4) for _ in range(4)])
    model[3].weight = model[0].weight
    report = lowbit.quantize_(model, lowbit.int8_weight_only())
    assert len(report.left) == 3 and "0.weight [10, 4], 1.weight [10, 4] and 1 more" in repr(report)


def test_an_embedding_tied_to_a_quantized_head_is_packed_with_it():
    report = lowbit.quantize_(gpt2(), lowbit.int8_weight_only())
    assert [weight.name for weight in report.left] == ["transformer.wpe.weight"]
