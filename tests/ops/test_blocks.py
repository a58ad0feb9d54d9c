# SPDX-License-Identifier: Apache-2.0
"""blocks_linear, blocks_dequantize, int8_linear: every row against float64 (int8 bit for bit), what they refuse, and that
nothing of a weight is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import settings
import torch
from torch import Tensor

from lowbit import _C, testing
from lowbit.reference.quantize import LEVELS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROWS = {op: [row["name"] for row in testing.rows(op) if row["available"]] for op in ("blocks_linear", "blocks_dequantize", "int8_linear")}
ISAS = list(dict.fromkeys(row["backend"] for row in testing.rows("blocks_linear") if row["available"]))


@pytest.fixture(params=ISAS)
def forced(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Call a function of `_C` with the row of an instruction set of this machine."""

    def call(op: str, format: str, *arguments: object) -> None:
        with settings.forced("_".join([op, format, str(request.param)] if format else [op, str(request.param)])):
            getattr(_C, op)(*arguments)

    return call


def weight_of(format: str, numel: int, block_size: int, nested: bool) -> tuple[list[Any], tuple[Tensor, ...], Tensor]:
    """(codes, absmax), the parts of scales that were quantized again, and the weights as float32."""
    blocks = -(-numel // block_size)
    codes = torch.randint(0, 16, (numel + numel % 2,), dtype=torch.uint8)
    scale = torch.rand(blocks) * torch.logspace(-3, 1, blocks)
    absmax, parts = scale, ()
    if nested:
        scale_codes, code_map = torch.randint(0, 256, (blocks,), dtype=torch.uint8), torch.linspace(-1, 1, 256)
        absmax, offset = torch.rand(-(-blocks // 256)), torch.tensor(0.7)
        scale = code_map[scale_codes.int()] * absmax.repeat_interleave(256)[:blocks] + offset
        parts = scale_codes, code_map, offset
    weights = LEVELS[format].float()[codes[:numel].int()] * scale.repeat_interleave(block_size)[:numel]
    return [codes[::2] << 4 | codes[1::2], absmax], parts, weights


@pytest.mark.core(*ROWS["blocks_linear"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("block_size", [32, 64, 128, 4096])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize(
    "m, n, k", [(1, 1, 8), (1, 17, 128), (2, 3, 136), (3, 33, 64), (4, 16, 392), (5, 6, 1000), (9, 18, 264), (1, 300, 1024)]
)
def test_every_row_is_within_the_roundings_of_its_sums(
    forced: Callable[..., None], m: int, n: int, k: int, format: str, block_size: int, nested: bool, subtests: pytest.Subtests
) -> None:
    """Blocks end with rows or not; k = 136, 392, 1000, 264 end inside of a chunk; the last shape has several threads."""
    stored, parts, weights = weight_of(format, n * k, block_size, nested)
    weights = weights.view(n, k).double()
    for dtype in FLOATS:
        x, y = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)
        for bias in (None, torch.randn(n).to(dtype)):
            with subtests.test(dtype=dtype, bias=bias is not None):
                forced("blocks_linear", format, x, *stored, _C.FORMATS[format], block_size, y, bias, *parts)
                added = 0 if bias is None else bias.double()
                wanted = x.double() @ weights.T + added
                magnitude = x.double().abs() @ weights.abs().T + abs(added)
                error = (k + 4) * testing.ROUNDOFF["float32"] * magnitude
                rounding = testing.ROUNDOFF[str(dtype).removeprefix("torch.")] * (wanted.abs() + error)
                smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
                testing.assert_within(y, wanted, error + rounding + smallest, what=f"{format} {dtype}")


@pytest.mark.core(*ROWS["blocks_dequantize"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("block_size", [32, 64, 4096])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
@pytest.mark.parametrize("numel", [1, 2, 31, 32, 33, 200, 4097, 100003])
def test_weights_are_those_of_float32(
    forced: Callable[..., None], numel: int, format: str, block_size: int, nested: bool, subtests: pytest.Subtests
) -> None:
    stored, parts, weights = weight_of(format, numel, block_size, nested)
    for dtype in FLOATS:
        for begin in {0, numel // 2 // 32 * 32}:
            with subtests.test(dtype=dtype, begin=begin):
                out = torch.empty(numel - begin, dtype=dtype)
                arguments = (*stored, _C.FORMATS[format], block_size, numel, begin, out, *parts)
                forced("blocks_dequantize", format, *arguments)
                assert torch.equal(out, weights[begin:].to(dtype)), (dtype, begin)


@pytest.mark.core(*ROWS["int8_linear"])
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (1, 17, 32), (2, 3, 31), (4, 16, 64), (5, 6, 1000), (9, 300, 1029)])
def test_int8_is_exact_until_it_is_scaled(forced: Callable[..., None], m: int, n: int, k: int, subtests: pytest.Subtests) -> None:
    x, weight = (torch.randint(-128, 128, (rows, k), dtype=torch.int8) for rows in (m, n))
    x[0] = weight[0] = -128  # the largest sum
    row_scale, column_scale = torch.rand(m), torch.rand(n)
    sums = (x.long() @ weight.long().T).int()
    for dtype in FLOATS:
        for bias in (None, torch.randn(n).to(dtype)):
            with subtests.test(dtype=dtype, bias=bias is not None):
                y = torch.empty(m, n, dtype=dtype)
                forced("int8_linear", "", x, weight, row_scale, column_scale, y, bias)
                wanted = sums * (row_scale[:, None] * column_scale) * 6.200124e-05
                assert torch.equal(y, (wanted if bias is None else wanted + bias).to(dtype))


def test_a_weight_may_change_between_calls() -> None:
    """Codes, scales, nested scales, in place and through another view: the next call reads them."""
    k = 256
    stored, parts, _ = weight_of("nf4", 16 * k, 64, True)
    x, y, again = torch.randn(1, k), torch.empty(1, 16), torch.empty(1, 16)
    arguments = (_C.FORMATS["nf4"], 64)
    for part in (*stored, *parts):
        before = torch.empty(1, 16)
        _C.blocks_linear(x, *stored, *arguments, before, None, *parts)
        part.data.numpy()[...] = (part + 1).numpy()  # no version of a tensor counts this
        _C.blocks_linear(x, *stored, *arguments, y, None, *parts)
        copies = [tensor.clone() for tensor in (*stored, *parts)]
        _C.blocks_linear(x, *copies[:2], *arguments, again, None, *copies[2:])
        assert torch.equal(y, again) and not torch.equal(y, before)


def linear_arguments() -> dict[str, Any]:
    stored, parts, _ = weight_of("nf4", 3 * 64, 64, True)
    names = "codes", "absmax", "scale_codes", "code_map", "offset"
    given = dict(zip(names, (*stored, *parts), strict=True))
    return given | {"x": torch.randn(2, 64), "y": torch.empty(2, 3), "bias": torch.zeros(3), "format": 5, "block_size": 64}


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"x": torch.randn(2, 64).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
        ({"x": torch.randn(2, 60), "y": torch.empty(2, 3)}, ValueError, "k must be a multiple of 8, got 60"),
        ({"x": torch.randn(64, 2).T}, ValueError, r"x must be contiguous, got strides \[1, 2\]"),
        ({"y": torch.empty(3, 3)}, ValueError, r"y must have shape \[2, 3\], got \[3, 3\]"),
        ({"y": torch.empty(2, 3).half()}, TypeError, "y must be float32, got float16"),
        ({"bias": torch.zeros(2)}, ValueError, r"bias must have shape \[3\], got \[2\]"),
        ({"format": 3}, ValueError, "format must be nf4 or fp4, got number 3"),
        ({"block_size": 48}, ValueError, "block_size must be a power of two from 32 to 4096, got 48"),
        ({"codes": torch.zeros(95, dtype=torch.uint8)}, ValueError, r"codes must have shape \[96\], got \[95\]"),
        ({"absmax": torch.zeros(2)}, ValueError, r"absmax must have shape \[1\], got \[2\]"),
        ({"scale_codes": torch.zeros(3)}, TypeError, "scale_codes must be uint8, got float32"),
        ({"code_map": torch.zeros(255)}, ValueError, r"code_map must have shape \[256\]"),
        ({"offset": torch.zeros(2)}, ValueError, "offset must be one float32"),
        ({"offset": None}, ValueError, "scale_codes, code_map and offset must be given together"),
    ],
)
def test_blocks_linear_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"blocks_linear: {text}"):
        _C.blocks_linear(**linear_arguments() | change)


def test_the_others_refuse() -> None:
    codes, absmax = torch.zeros(32, dtype=torch.uint8), torch.zeros(1)
    with pytest.raises(ValueError, match="blocks_dequantize: begin must be a multiple of 32 .* got 8 and 4 elements"):
        _C.blocks_dequantize(codes, absmax, _C.FORMATS["nf4"], 64, 64, 8, torch.empty(4))
    with pytest.raises(ValueError, match="blocks_dequantize: begin .* inside of numel=64, got 32 and 33 elements"):
        _C.blocks_dequantize(codes, absmax, _C.FORMATS["nf4"], 64, 64, 32, torch.empty(33))
    x, weight = torch.zeros(2, 8, dtype=torch.int8), torch.zeros(3, 8, dtype=torch.int8)
    with pytest.raises(TypeError, match="int8_linear: weight must be int8, got uint8"):
        _C.int8_linear(x, weight.view(torch.uint8), torch.ones(2), torch.ones(3), torch.empty(2, 3))
    with pytest.raises(ValueError, match=r"int8_linear: row_scale must have shape \[2\], got \[3\]"):
        _C.int8_linear(x, weight, torch.ones(3), torch.ones(3), torch.empty(2, 3))


@pytest.mark.parametrize("m, n", [(0, 3), (2, 0)])
def test_no_elements(m: int, n: int) -> None:
    codes, absmax = torch.zeros(n * 32, dtype=torch.uint8), torch.ones(n)
    _C.blocks_linear(torch.ones(m, 64), codes, absmax, _C.FORMATS["nf4"], 64, torch.empty(m, n))
    x, weight = torch.ones(m, 8, dtype=torch.int8), torch.ones(n, 8, dtype=torch.int8)
    _C.int8_linear(x, weight, torch.ones(m), torch.ones(n), torch.empty(m, n))
