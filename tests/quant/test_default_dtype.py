# SPDX-License-Identifier: Apache-2.0
"""Nothing depends on torch's default dtype or default device where nn.Linear would not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from settings import ambient
from torch import nn

import lowbit
from lowbit.quant import QuantLinear
from lowbit.reference import layout
from lowbit.reference import quantize as reference


@pytest.fixture(params=["dtype float64", "dtype bfloat16", "device meta"])
def other_default(request) -> Iterator[None]:
    with ambient(f"default {request.param}"):
        yield


def weights() -> torch.Tensor:
    return torch.randn(33, 100, dtype=torch.float32, device="cpu", generator=torch.Generator("cpu").manual_seed(0))


def test_quantize_unpack_pack_and_back(config, other_default):
    linear = nn.Linear(100, 33, dtype=torch.float32, device="cpu")
    linear.weight.data = weights()
    model = nn.Sequential(linear)
    lowbit.quantize_(model, config)
    layer = model[0]
    x = torch.ones(2, 100, dtype=torch.float32, device="cpu")
    y = layer(x)
    assert y.dtype == torch.float32 and y.device.type == "cpu"
    if not layer.spec.is_float:
        codes, scale, zero = layer.unpack()
        assert (
            codes.dtype == torch.uint8
            and scale.dtype == zero.dtype == torch.float32
            and codes.device.type == scale.device.type == "cpu"
        )
        again = QuantLinear.pack(codes, scale, zero if layer.spec.asymmetric else None, layer.spec, layer.bias)
        assert torch.equal(again.unpack()[0], codes)
    assert layer.to_linear().weight.dtype == torch.float32
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fresh = nn.Sequential(nn.Linear(100, 33))
    assert lowbit.load(fresh, state) == ["0"] and torch.equal(fresh(x), y)
    assert lowbit.dequantize_(model) == ["0"] and model[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    "format, group_size, mapping", [("int8", 0, "symmetric"), ("int4", 32, "asymmetric"), ("int4", 64, "symmetric")]
)
def test_the_reference_packs_the_same_bytes(other_default, format, group_size, mapping):
    quantized = reference.quantize(weights(), format, group_size, mapping)
    packed = layout.pack(quantized)
    again = layout.unpack(packed, 33, 100, format, group_size, mapping == "asymmetric")
    assert torch.equal(again.codes, quantized.codes) and torch.equal(again.decode(), quantized.decode())


def test_gated_mlps_fuse(other_default):
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"dtype": torch.float32, "device": "cpu"}
            self.gate_proj, self.up_proj = nn.Linear(64, 96, **options), nn.Linear(64, 96, **options)
            self.down_proj, self.act_fn = nn.Linear(96, 64, **options), nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    model = nn.ModuleDict({"mlp": MLP()})
    lowbit.quantize_(model, lowbit.int8_weight_only())
    assert lowbit.fuse_gated_mlps(model) == ["mlp"]
