# SPDX-License-Identifier: Apache-2.0
"""lowbit.export.executorch.export: the graph that XNNPACK's partitioner takes, and, where ExecuTorch is there,
that its runtime computes it within the roundings of XNNPACK."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import lowbit
from lowbit.export.executorch import export
from lowbit.quant import QuantLinear
from lowbit.testing import assert_within

W4A8 = lowbit.int8_dynamic_activation_int4_weight
CONFIGS = {
    "W4A8 g32": W4A8(group_size=32, scale="absmax"),
    "W4A8 per channel": W4A8(group_size=None, scale="absmax"),
    "W8A8": lowbit.int8_dynamic_activation_int8_weight(),
    "3 bits": lowbit.int8_dynamic_activation_intx_weight(torch.int3, 64, scale="absmax"),
}


class Decoder(nn.Module):
    """Words, attention of lowbit, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(64, 96), nn.Linear(96, 288), nn.Linear(96, 64, bias=False)

    def forward(self, indices: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 24)).transpose(1, 2) for part in self.qkv(self.words(indices)).chunk(3, -1))
        y = lowbit.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(y.transpose(1, 2).flatten(-2))


def ops(program: ExportedProgram) -> Counter[str]:
    calls = (node for node in program.graph.nodes if node.op == "call_function")
    return Counter(node.target.__name__.removesuffix(".default") for node in calls)


def layer_of(config: Any, k: int = 128, n: int = 96) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(k, n)).eval()
    lowbit.quantize_(model, config)
    return model


def run(program: ExportedProgram, *inputs: Tensor) -> tuple[Tensor, Counter[str]]:
    """The result by the runtime of ExecuTorch, and the ops of the lowered graph."""
    pytest.importorskip("executorch")
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    file = lowered.to_executorch().buffer  # the program does not keep it, nor a method its program
    loaded = Runtime.get().load_program(file)
    (y,) = loaded.load_method("forward").execute(list(inputs))
    return y.clone(), ops(lowered.exported_program())


def within_roundings(y: Tensor, layer: QuantLinear, x: Tensor) -> None:
    """A step of x at most, as its zero point is a whole number; scales of groups as bfloat16; a float32 sum."""
    w, x = layer.dequantize(torch.float64), x.double()
    magnitude = x.abs() @ w.abs().T
    step = (x.amax(-1, keepdim=True).clamp(min=0) - x.amin(-1, keepdim=True).clamp(max=0)) / 255
    scales = 2.0**-9 if layer.spec.group_size else 0
    allowed = step * w.abs().sum(1) + (scales + (x.shape[-1] + 8) * 2.0**-24) * magnitude
    assert_within(y, x @ w.T + layer.bias.double(), allowed)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_is_the_pattern_of_the_partitioner(name: str) -> None:
    model = layer_of(CONFIGS[name])
    program = export(model, (torch.randn(2, 128),))
    grouped = bool(model[0].spec.group_size)
    assert ops(program) == {
        "choose_qparams_per_token_asymmetric": 1, "getitem": 2, "quantize_per_token": 1, "dequantize_per_token": 1,
        "dequantize_per_channel_group" if grouped else "dequantize_per_channel": 1, "linear": 1,
    }  # fmt: skip
    weights = [tensor for tensor in program.state_dict.values() if tensor.dim() == 2 and tensor.shape[1] == 128]
    assert [tensor.dtype for tensor in weights] == [torch.int8]
    x = torch.randn(5, 128)
    with torch.no_grad():
        within_roundings(program.module()(x[:2]), model[0], x[:2])


def test_half_precision_is_widened_and_rounded_once() -> None:
    model, x = layer_of(CONFIGS["W8A8"]), torch.randn(2, 128, dtype=torch.float16)
    wanted = export(model.half(), (x.float(),)).module()(x.float())
    assert torch.equal(export(model, (x,)).module()(x), wanted.half())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_runtime_is_within_the_roundings(name: str) -> None:
    model = layer_of(CONFIGS[name])
    shapes = ({0: Dim("batch", max=8), 1: Dim("length", max=16)},)
    program = export(model, (torch.randn(2, 3, 128),), dynamic_shapes=shapes)
    x = torch.randn(5, 7, 128)
    y, lowered = run(program, x)
    assert lowered == {"executorch_call_delegate": 1, "getitem": 1}
    within_roundings(y, model[0], x)


def test_a_model_with_words_and_attention_runs() -> None:
    model = Decoder().eval()
    config, head = CONFIGS["W4A8 g32"], CONFIGS["W8A8"]
    lowbit.quantize_(model, config, filter_fn=lambda module, name: name == "qkv")
    lowbit.quantize_(model, head, filter_fn=lambda module, name: name in ("words", "head"))
    indices = torch.randint(0, 64, (1, 9))
    program = export(model, (indices,))
    assert "lowbit" not in str(program.graph) and "scaled_dot_product_attention" in ops(program)
    with torch.no_grad():
        wanted = model(indices)
    y, _ = run(program, indices)
    assert (y - wanted).norm() <= 0.03 * wanted.norm()  # two roundings of x to int8, and of scales to bfloat16


def test_a_group_of_zeros_has_a_scale_above_zero() -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    model[0].weight.data[3, :32] = 0
    lowbit.quantize_(model, CONFIGS["W4A8 g32"])
    program = export(model, (torch.randn(2, 64),))
    scale, codes = program.state_dict["0.scale"], program.state_dict["0.codes"]
    assert scale[3, 0] == 1 and (scale > 0).all() and not codes[3, :32].any()


AFFINE = lowbit.MappingType.ASYMMETRIC
REFUSED = [
    (lowbit.nf4_weight_only(), 128, "have integer codes for XNNPACK, got nf4 g64 of k=128"),
    (lowbit.int4_weight_only(32), 128, "have int8 activations"),
    (W4A8(32, mapping_type=AFFINE), 128, "be symmetric"),
    (W4A8(32, scale="absmax"), 100, "have whole groups"),
    (
        lowbit.int8_dynamic_activation_int8_weight(32),
        128,
        "have one scale per channel, or 4 bits at most in groups of 32",
    ),
    (W4A8(32), 128, r"have no negative scales for XNNPACK, got \d+ of 384: use scale='absmax'"),
]


@pytest.mark.parametrize("config, k, wanted", REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_a_layer_that_xnnpack_has_no_form_for_is_named(config: Any, k: int, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"export: 0 must {wanted}"):
        export(layer_of(config, k), (torch.randn(2, k),))
