# SPDX-License-Identifier: Apache-2.0
"""MXFP4 and NVFP4 weights are read exactly."""

from __future__ import annotations

import pytest
import torch

import lowbit
from lowbit.checkpoints.microscaling import from_mxfp4, from_nvfp4
from lowbit.peers.torchao import from_torchao

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("base", [1, 60, 127, 200, 248])
def test_every_weight_is_what_the_standard_says(base: int) -> None:
    codes, scales = torch.randint(0, 16, (20, 96)), base + torch.randint(0, 3, (20, 3))
    blocks = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    wanted = values * torch.exp2(scales.double() - 127).repeat_interleave(32, dim=1)
    layer = from_mxfp4(blocks.view(20, 3, 16), scales.to(torch.uint8))
    assert torch.equal(layer.dequantize().double(), wanted)
    assert torch.equal(from_mxfp4(blocks, scales.to(torch.uint8), torch.ones(20)).weight, layer.weight)


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        ([[127, 255]], "no nan"),
        ([[127, 102]], r"within 2 \*\* 24"),
        ([[0, 0]], r"2 \*\* -126 or more"),
        ([[127]], r"got torch.uint8 \[1, 32\] and torch.uint8 \[1, 1\]"),
    ],
)
def test_scales_that_cannot_be_kept_are_refused(scales: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=f"from_mxfp4: .*{text}"):
        from_mxfp4(torch.zeros(1, 32, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8))


def test_scales_2_24_apart_are_exact() -> None:
    layer = from_mxfp4(torch.full((1, 32), 0x22, dtype=torch.uint8), torch.tensor([[127, 103]], dtype=torch.uint8))
    assert layer.dequantize()[0].unique().tolist() == [2.0**-24, 1.0]


@pytest.mark.parametrize("n, k", [(1, 16), (20, 96), (33, 1040)])
def test_every_nvfp4_weight_is_the_product_of_its_three_parts(n: int, k: int, subtests: pytest.Subtests) -> None:
    codes, whole = torch.randint(0, 16, (n, k)), torch.tensor(0.0123)
    scale = (torch.rand(n, k // 16) * 448).to(torch.float8_e4m3fn)
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    layer = from_nvfp4(packed, scale, whole, torch.ones(n))
    wanted = values.double() * scale.double().repeat_interleave(16, dim=1) * whole.double()
    assert torch.equal(layer.dequantize(), wanted.float())  # one rounding: codes times float8 are exact
    for m in (1, 5, 40):  # each way of the rows: streamed, in tiles
        with subtests.test(m=m):
            x = torch.randn(m, k)
            error = (k + 8) * 2.0**-24 * (x.double().abs() @ wanted.abs().T + 1)
            assert ((layer(x).double() - (x.double() @ wanted.T + 1)).abs() <= error).all()
    assert torch.equal(layer.unpack()[0], codes.byte())


def test_nvfp4_weights_of_torchao_are_what_torchao_says(subtests: pytest.Subtests) -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    for whole in (None, torch.tensor(0.0078)):
        with subtests.test(whole=whole):
            weight = nvfp4.NVFP4Tensor.to_nvfp4(torch.randn(48, 160), per_tensor_scale=whole, is_swizzled_scales=False)
            state = from_torchao({"0.weight": weight})
            model = torch.nn.Sequential(torch.nn.Linear(160, 48, bias=False))
            lowbit.load(model, state)
            torch.testing.assert_close(model[0].dequantize(), weight.dequantize(torch.float32), rtol=2.0**-23, atol=0)
    weight = nvfp4.NVFP4Tensor.to_nvfp4(torch.randn(128, 64), is_swizzled_scales=True)
    with pytest.raises(ValueError, match="from_torchao: 0.weight must have its scales in order, got swizzled ones"):
        from_torchao({"0.weight": weight})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight_scale": torch.ones(2, 2)}, r"got torch.uint8 \[2, 16\], torch.float32 \[2, 2\]"),
        ({"weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn)}, r"torch.float8_e4m3fn \[2, 1\]"),
        ({"weight_scale_2": torch.ones(2)}, r"and \[2\]"),
        ({"weight_scale_2": float("nan")}, "must be finite"),
        ({"weight_scale": torch.full((2, 2), float("nan")).to(torch.float8_e4m3fn)}, "must be finite"),
        ({"weight": torch.zeros(2, 15, dtype=torch.uint8)}, r"got torch.uint8 \[2, 15\]"),
    ],
)
def test_what_is_no_nvfp4_weight_is_refused(changes: dict[str, object], text: str) -> None:
    given = {"weight": torch.zeros(2, 16, dtype=torch.uint8), "weight_scale": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match=f"from_nvfp4: .*{text}"):
        from_nvfp4(**{**given, **changes})
