# SPDX-License-Identifier: Apache-2.0
"""The products of bitsandbytes' Linear4bit and Linear8bitLt, on the weights where bitsandbytes has them.

Nothing of a weight is packed or kept between calls: there is one copy of it, bitsandbytes', and a program's writes into
it count from the next call on. Few rows of x are multiplied by the codes themselves; for more, some rows of the weight
at a time become floats, which stay in a cache while they are multiplied. Weights are exact in the first case, where
bitsandbytes rounds them to the dtype of x, and sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from lowbit import _C
from lowbit.ops.fakes import FLOATS

_FORMATS = {name: _C.FORMATS[name] for name in ("nf4", "fp4")}
_BLOCK_SIZES = {2**i for i in range(5, 13)}
_FEW_ROWS = 16
"""Rows of x that are multiplied by the codes. On a Sapphire Rapids, [4096, 4096] and one thread, 16 take as long as
with a weight of bfloat16 made first (13 ms), 32 as long as with one of float32 (27 ms)."""
_FEW_INT8_ROWS = 4
"""The same of LLM.int8, against torch._int_mm: 8 rows take as long."""
_PART = 2**20
"""Weights that become floats at a time: 12 ms in all for 8 rows of bfloat16, where all 2^24 at once take 29."""


def gemm_4bit(theirs: Callable[[], Tensor], A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor,
              blocksize: int, quant_type: str, bias: Tensor | None = None, absmax_8bit: Tensor | None = None,
              absmax_code: Tensor | None = None, absmax_offset: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return ``A @ w.T + bias`` for a weight w of ``shapeB`` [n, k], its scales quantized again or not."""
    nested = None if absmax_8bit is None else (absmax_8bit, absmax_code, absmax_offset)
    weight = _weight(B, absmax, blocksize, quant_type, prod(shapeB), nested)
    if weight is None or len(shapeB) != 2 or A.dtype not in FLOATS or A.dim() < 1 or A.shape[-1] != shapeB[1]:
        return theirs()
    if bias is not None and (bias.dtype != A.dtype or bias.shape != (shapeB[0],)):
        return theirs()
    return _product(A, weight, *shapeB, bias)


def gemv_4bit(theirs: Callable[[], Tensor], A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor, code: Tensor,
              blocksize: int) -> Tensor:  # fmt: skip
    """Return ``A @ w.T``. A weight in bitsandbytes' own order for AVX512-BF16, whose absmax is bfloat16
    ``[k / blocksize, n]``, is theirs."""
    weight = _weight(B, absmax, blocksize, "fp4" if code[1] > 0 else "nf4", prod(shapeB), None)
    if weight is None or len(shapeB) != 2 or A.dtype not in FLOATS or A.dim() < 1 or A.shape[-1] != shapeB[1]:
        return theirs()
    return _product(A, weight, *shapeB, None)


def dequantize_4bit(theirs: Callable[[], Tensor], A: Tensor, absmax: Tensor, blocksize: int, quant_type: str,
                    shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Return the weight of ``shape``, right for any number of columns (bitsandbytes' AVX-512 kernel wants whole blocks
    in a row)."""
    weight = _weight(A, absmax, blocksize, quant_type, prod(shape), None)
    if weight is None or dtype not in FLOATS:
        return theirs()
    out = A.new_empty(shape, dtype=dtype)
    weight.dequantize(0, out)
    return out


def int8_scaled_mm(
    theirs: Callable[[], Tensor],
    A: Tensor,
    B: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``A @ B.T * row_stats * col_stats / 127**2 + bias`` of few rows: codes by codes, without an int32
    result in between."""
    dtype = dtype or torch.float16
    tensors = [A, B, row_stats, col_stats] + ([] if bias is None else [bias])
    if not (
        A.dim() == B.dim() == 2
        and A.shape[0] <= _FEW_INT8_ROWS
        and A.shape[1] == B.shape[1]
        and A.dtype == B.dtype == torch.int8
        and row_stats.dtype == col_stats.dtype == torch.float32
        and (row_stats.numel(), col_stats.numel()) == (A.shape[0], B.shape[0])
        and dtype in FLOATS
        and (bias is None or (bias.dtype in FLOATS and bias.shape == B.shape[:1]))
        and all(tensor.is_contiguous() for tensor in tensors)
    ):
        return theirs()
    out = A.new_empty(A.shape[0], B.shape[0], dtype=dtype)
    _C.int8_linear(A, _plain(B), row_stats.flatten(), col_stats.flatten(), out, bias)
    return out


class _Weight:
    """A weight as the calls of `_C` take it, its tensors those of bitsandbytes."""

    def __init__(self, codes: Tensor, absmax: Tensor, format: int, blocksize: int, numel: int) -> None:
        self.codes, self.absmax, self.format, self.blocksize, self.numel = codes, absmax, format, blocksize, numel
        self.nested: tuple[Tensor, ...] = ()

    def multiply(self, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        _C.blocks_linear(x, self.codes, self.absmax, self.format, self.blocksize, y, bias, *self.nested)

    def dequantize(self, begin: int, out: Tensor) -> None:
        _C.blocks_dequantize(
            self.codes, self.absmax, self.format, self.blocksize, self.numel, begin, out, *self.nested
        )


def _weight(
    stored: Tensor,
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    numel: int,
    nested: tuple[Tensor | None, ...] | None,
) -> _Weight | None:
    """The weight, or None if it is not as bitsandbytes' ops describe it; then bitsandbytes raises the error."""
    format = _FORMATS.get(quant_type)
    if format is None or blocksize not in _BLOCK_SIZES or absmax.dtype != torch.float32 or absmax.dim() != 1:
        return None
    codes, blocks = _plain(stored).view(-1).view(torch.uint8), -(-numel // blocksize)
    if not numel or codes.numel() != -(-numel // 2) or absmax.numel() != (-(-blocks // 256) if nested else blocks):
        return None
    weight = _Weight(codes, absmax.contiguous(), format, blocksize, numel)
    if nested is not None:
        scale_codes, code_map, offset = nested
        if code_map is None or offset is None or scale_codes is None:
            return None
        if scale_codes.dtype != torch.uint8 or scale_codes.shape != (blocks,) or code_map.shape != (256,):
            return None
        if code_map.dtype != torch.float32 or offset.dtype not in FLOATS or offset.numel() != 1:
            return None
        weight.nested = scale_codes.contiguous(), code_map.contiguous(), offset.float()
    return weight


def _plain(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and not as a Params4bit or Int8Params, of which each call would go through Python."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().contiguous()


def _product(A: Tensor, weight: _Weight, n: int, k: int, bias: Tensor | None) -> Tensor:
    x = A.reshape(-1, k).contiguous()
    if bias is not None:
        bias = bias.detach().contiguous()
    y = x.new_empty(x.shape[0], n)
    if x.shape[0] <= _FEW_ROWS and k % 8 == 0:
        weight.multiply(x, y, bias)
        return y.view(*A.shape[:-1], n)
    rows = min(n, max(32, _PART // k // 32 * 32))  # a multiple of 32: each part begins at a whole byte
    part = x.new_empty(rows, k)
    for begin in range(0, n, rows):
        some = part[: min(rows, n - begin)]
        weight.dequantize(begin * k, some)
        end = begin + some.shape[0]
        y[:, begin:end] = functional.linear(x, some, None if bias is None else bias[begin:end])
    return y.view(*A.shape[:-1], n)
