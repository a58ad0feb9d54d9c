# SPDX-License-Identifier: Apache-2.0
"""The products of bitsandbytes' Linear4bit and Linear8bitLt, computed from bitsandbytes' own weights.

Nothing of a weight is packed or kept between calls. There is one copy, bitsandbytes', and a program's writes to it take
effect from the next call on. A few rows of x are multiplied by the codes directly. For more rows, parts of the weight
are dequantized in turn, and stay in a cache while they are multiplied. With few rows the weights are exact, while
bitsandbytes rounds them to the dtype of x. Sums are float32.
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
"""The max number of rows of x that are multiplied by the codes directly. On a Sapphire Rapids with one thread and a
[4096, 4096] weight, 16 rows take as long as dequantizing to bfloat16 first (13 ms), and 32 rows as long as dequantizing
to float32 (27 ms)."""
_FEW_INT8_ROWS = 4
"""The same for LLM.int8, compared with torch._int_mm, which is as fast at 8 rows."""
_PART = 2**20
"""The number of weights that are dequantized at a time. 8 rows of bfloat16 take 12 ms this way, and 29 ms with all 2^24
weights at once (same machine)."""


def gemm_4bit(theirs: Callable[[], Tensor], A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor,
              blocksize: int, quant_type: str, bias: Tensor | None = None, absmax_8bit: Tensor | None = None,
              absmax_code: Tensor | None = None, absmax_offset: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return ``A @ w.T + bias`` for a weight w of ``shapeB`` [n, k], whose scales may be nested."""
    nested = None if absmax_8bit is None else (absmax_8bit, absmax_code, absmax_offset)
    weight = _weight(B, absmax, blocksize, quant_type, prod(shapeB), nested)
    if weight is None or len(shapeB) != 2 or A.dtype not in FLOATS or A.dim() < 1 or A.shape[-1] != shapeB[1]:
        return theirs()
    if bias is not None and (bias.dtype != A.dtype or bias.shape != (shapeB[0],)):
        return theirs()
    return _product(A, weight, *shapeB, bias)


def gemv_4bit(theirs: Callable[[], Tensor], A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor, code: Tensor,
              blocksize: int) -> Tensor:  # fmt: skip
    """Return ``A @ w.T``. A weight in bitsandbytes' own order for AVX512-BF16, with bfloat16 absmax ``[k / blocksize,
    n]``, is left to bitsandbytes."""
    weight = _weight(B, absmax, blocksize, "fp4" if code[1] > 0 else "nf4", prod(shapeB), None)
    if weight is None or len(shapeB) != 2 or A.dtype not in FLOATS or A.dim() < 1 or A.shape[-1] != shapeB[1]:
        return theirs()
    return _product(A, weight, *shapeB, None)


def dequantize_4bit(theirs: Callable[[], Tensor], A: Tensor, absmax: Tensor, blocksize: int, quant_type: str,
                    shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Return the weight of ``shape``. Any number of columns is correct, while bitsandbytes' AVX-512 kernel requires
    rows of whole blocks."""
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
    """Return ``A @ B.T * row_stats * col_stats / 127**2 + bias`` for few rows, without an intermediate int32 result."""
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
    """A weight in the form that the functions of `_C` take. Its tensors are bitsandbytes'."""

    def __init__(self, codes: Tensor, absmax: Tensor, format: int, blocksize: int, numel: int) -> None:
        self.codes, self.absmax, self.format, self.blocksize, self.numel = codes, absmax, format, blocksize, numel
        self.nested: tuple[Tensor, ...] = ()

    def multiply(self, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        _C.blocks_linear(x, self.codes, self.absmax, self.format, self.blocksize, y, bias, *self.nested)

    def dequantize(self, begin: int, out: Tensor) -> None:
        _C.blocks_dequantize(self.codes, self.absmax, self.format, self.blocksize, self.numel, begin, out, *self.nested)


def _weight(
    stored: Tensor,
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    numel: int,
    nested: tuple[Tensor | None, ...] | None,
) -> _Weight | None:
    """Return the weight, or None if it is not valid for bitsandbytes' ops, so that bitsandbytes raises the error."""
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
    """Return the tensor, contiguous and as a plain Tensor: calls with a Params4bit or Int8Params go through Python."""
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
    rows = min(n, max(32, _PART // k // 32 * 32))  # a multiple of 32, so that each part begins at a whole byte
    part = x.new_empty(rows, k)
    for begin in range(0, n, rows):
        some = part[: min(rows, n - begin)]
        weight.dequantize(begin * k, some)
        end = begin + some.shape[0]
        y[:, begin:end] = functional.linear(x, some, None if bias is None else bias[begin:end])
    return y.view(*A.shape[:-1], n)
