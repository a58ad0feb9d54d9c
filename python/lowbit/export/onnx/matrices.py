# SPDX-License-Identifier: Apache-2.0
"""The form of each weight format in ONNX: its tensors, its product with x, and its rows.

Codes, scales and zero points do not change, and all arithmetic is float32. Nothing is computed from weights alone,
because the exporter would fold it into float weights.

    int2 .. int8      MatMulNBits of com.microsoft, with 2, 4 or 8 bits: the first that holds the codes
    int8 per channel  MatMulInteger, if activations are int8 with a scale per row
    nf4, fp4          MatMulBnb4 of com.microsoft
    fp8_e4m3          DequantizeLinear, per channel or in blocks
    fp4_e2m1          MatMulNBits with 8 bits: twice its levels are integers
    floats            MatMul
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit import _C
from lowbit.export.onnx.activations import rounded
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.codes import CodedWeight, bit_stream, levels_of

_WIDTHS = (2, 4, 8)
_BLOCKS = (16, 256)  # min and max block of MatMulNBits and MatMulBnb4
_MIDDLE = 128  # the code of 0 in int8
_FLOAT32, _INT8 = 1, 4  # values of accuracy_level: the type that x may be rounded to


class Matrix(nn.Module):
    """A weight ``[n, k]`` in ONNX."""

    def __init__(self, n: int, k: int, **tensors: Tensor | None) -> None:
        super().__init__()
        self.n, self.k = n, k
        for name, tensor in tensors.items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def product(self, x: Tensor, spec: LinearSpec) -> Tensor:
        """Return the product of the weight and ``x``, float32 ``[..., k]``, rounded as ``spec`` says: ``[..., n]``."""
        raise NotImplementedError

    def rows(self, indices: Tensor) -> Tensor:
        """Return these rows of the weight, float32 ``[..., k]``."""
        raise NotImplementedError

    def call(
        self, op: str, inputs: Sequence[Tensor], x: Tensor, dtype: torch.dtype = torch.float32, version: int = 1,
        **attributes: Any,
    ) -> Tensor:  # fmt: skip
        """Return the product with ``x`` by an ONNX op that torch does not have."""
        shape = (*x.shape[:-1], self.n)
        return torch.onnx.ops.symbolic(op, inputs, attributes, dtype=dtype, shape=shape, version=version)


class BlockMatrix(Matrix):
    """Integers with a scale and optionally a zero point per block.

    Codes are ``[n, blocks, bytes]``, the first in the lowest bits, and scales ``[n, blocks]``. Zero points are packed
    like codes if they are valid codes, else float32 ``[n, blocks]``. MatMulNBits then gets no zero point, and ``scale *
    (its default zero point - zero) * sum of x`` of each block is added.
    """

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group_size: int) -> None:
        n, k = codes.shape
        block = group_size or _block_of(k)
        codes, scale, zero = _in_blocks(codes, scale, zero, group_size, block)
        packed = correction = None
        if zero is not None and bool((zero == zero.round().clamp(0, 2**bits - 1)).all()):
            packed, zero = bit_stream(zero.byte(), bits), None
        elif zero is not None:
            correction = scale * (2 ** (bits - 1) - zero)
        codes = bit_stream(codes, bits).view(n, -1, block * bits // 8)
        super().__init__(n, k, codes=codes, scale=scale, packed_zero=packed, zero=zero, correction=correction)
        self.bits, self.block = bits, block

    def product(self, x: Tensor, spec: LinearSpec) -> Tensor:
        accuracy = _FLOAT32
        if spec.x_format != "float":
            x = rounded(x, spec.x_format, spec.group_size).decode()
            # Rounding a block of codes times its scale again changes nothing, so a runtime may multiply integers.
            accuracy = _INT8 if spec.x_format == "int8_group" and spec.group_size else _FLOAT32
        inputs = [x, self.codes, self.scale, *([] if self.packed_zero is None else [self.packed_zero])]
        attributes = {"K": self.k, "N": self.n, "bits": self.bits, "block_size": self.block}
        y = self.call("com.microsoft::MatMulNBits", inputs, x, **attributes, accuracy_level=accuracy)
        if self.correction is None:
            return y
        sums = functional.pad(x, (0, -self.k % self.block)).unflatten(-1, (-1, self.block)).sum(-1)
        return y + functional.linear(sums, self.correction)

    def rows(self, indices: Tensor) -> Tensor:
        zero: Tensor | float = float(2 ** (self.bits - 1))
        if self.zero is not None:
            zero = _rows(self.zero, indices)[..., None]
        elif self.packed_zero is not None:
            zero = _unpacked(_rows(self.packed_zero, indices), self.bits)[..., : self.scale.shape[1], None]
        steps = _unpacked(_rows(self.codes, indices), self.bits) - zero
        return (steps * _rows(self.scale, indices)[..., None]).flatten(-2)[..., : self.k]


class Int8Matrix(Matrix):
    """int8 per channel, multiplied exactly by int8 activations with a scale per row.

    Codes are uint8 ``[n, k]``, scale and zero point ``[n]``. For asymmetric activations there is the sum of each row
    without its zero point. Both factors are uint8 with 128 for 0, because onnxruntime saturates sums of uint8 times
    int8 on processors without VNNI.
    """

    def __init__(self, weight: CodedWeight) -> None:
        n, k = weight.codes.shape
        zero = None if weight.zero is None else weight.zero[:, 0].float() - _MIDDLE
        sums = None
        if weight.spec.x_format == "int8_row_asymmetric":
            sums = (weight.codes.double() - weight.zero_point.double()).sum(1).float()
        middle = torch.tensor(_MIDDLE, dtype=torch.uint8, device=weight.codes.device)
        super().__init__(n, k, codes=weight.codes, middle=middle, scale=weight.scale[:, 0], zero=zero, sums=sums)

    def product(self, x: Tensor, spec: LinearSpec) -> Tensor:
        row = rounded(x, spec.x_format, 0)
        steps = row.codes.flatten(-2)
        inputs = [(steps + _MIDDLE).to(torch.uint8), self.codes.T, self.middle, self.middle]
        y = self.call("MatMulInteger", inputs, x, torch.int32, version=10).float()
        if self.zero is not None:
            y = y - steps.sum(-1, keepdim=True) * self.zero
        if row.zero is not None:
            y = y - row.zero.squeeze(-1) * self.sums
        return y * row.scale.squeeze(-1) * self.scale

    def rows(self, indices: Tensor) -> Tensor:
        steps = _rows(self.codes, indices).float() - _MIDDLE
        if self.zero is not None:
            steps = steps - _rows(self.zero, indices)[..., None]
        return steps * _rows(self.scale, indices)[..., None]


class TableMatrix(Matrix):
    """4-bit codes of a table with a scale per block, as bitsandbytes packs them: the first code of a byte in its high
    bits. Rows are padded to whole blocks with codes of 0."""

    TYPES = {"fp4": 0, "nf4": 1}

    def __init__(self, weight: CodedWeight) -> None:
        n, k = weight.codes.shape
        block = weight.spec.group_size or _block_of(k)
        levels = levels_of(weight.spec.format)
        zero = int((levels == 0).nonzero()[0])
        codes, scale, _ = _in_blocks(weight.codes, weight.scale, None, weight.spec.group_size, block, filling=zero)
        pairs = bit_stream(codes.view(n, -1, 2).flip(-1).flatten(1), 4)
        super().__init__(n, k, codes=pairs.view(n, -1, block // 2), scale=scale, levels=levels)
        self.type, self.block = self.TYPES[weight.spec.format], block

    def product(self, x: Tensor, spec: LinearSpec) -> Tensor:
        attributes = {"K": self.k + -self.k % self.block, "N": self.n, "block_size": self.block}
        x = functional.pad(x, (0, -self.k % self.block)) if self.k % self.block else x
        inputs = [x, self.codes.flatten(), self.scale.flatten()]
        return self.call("com.microsoft::MatMulBnb4", inputs, x, **attributes, quant_type=self.type)

    def rows(self, indices: Tensor) -> Tensor:
        codes = _unpacked(_rows(self.codes, indices), 4, first_in_high_bits=True).int()
        return (_rows(self.levels, codes) * _rows(self.scale, indices)[..., None]).flatten(-2)[..., : self.k]


class Float8Matrix(Matrix):
    """float8_e4m3fn codes ``[n, k]`` with a scale per channel or block, ``[n, blocks]``. For rows, the codes are bytes
    that index a table of values, because onnxruntime cannot gather float8."""

    def __init__(self, weight: CodedWeight) -> None:
        n, k = weight.codes.shape
        table = {"bytes": weight.codes, "levels": levels_of(weight.spec.format)}
        super().__init__(n, k, codes=weight.codes.view(torch.float8_e4m3fn), scale=weight.scale, **table)
        self.group_size = weight.spec.group_size

    def product(self, x: Tensor, spec: LinearSpec) -> Tensor:
        if spec.x_format != "float":
            x = rounded(x, spec.x_format, spec.group_size).decode()
        blocks = {"axis": 1, "block_size": self.group_size} if self.group_size else {"axis": 0}
        scale = self.scale if self.group_size else self.scale.flatten()
        weight = torch.onnx.ops.symbolic(
            "DequantizeLinear", [self.codes, scale], blocks, dtype=torch.float32, shape=(self.n, self.k), version=21
        )
        return functional.linear(x, weight)

    def rows(self, indices: Tensor) -> Tensor:
        values, size = _rows(self.levels, _rows(self.bytes, indices).int()), self.group_size or self.k
        values = functional.pad(values, (0, -self.k % size)).unflatten(-1, (-1, size))
        return (values * _rows(self.scale, indices)[..., None]).flatten(-2)[..., : self.k]


class FloatMatrix(Matrix):
    """A float weight, multiplied in float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(*weight.shape, weight=weight)

    def product(self, x: Tensor, spec: LinearSpec) -> Tensor:
        return functional.linear(x, self.weight.float())

    def rows(self, indices: Tensor) -> Tensor:
        return _rows(self.weight, indices).float()


def matrix_of(packed: Tensor, stored: StoredWeight, name: str) -> Matrix:
    """Return the packed weight of the layer ``name`` in ONNX.

    Raises:
        ValueError: ONNX does not support its format.
    """
    spec = stored.spec
    facts = _C.FORMAT_FACTS[spec.format]
    if spec.is_float:
        args = spec.weight_args(stored.n, stored.k)
        return FloatMatrix(torch.ops.lowbit.dequantize(packed, *args).to(getattr(torch, spec.format)))
    weight = CodedWeight.unpack(packed, stored)
    if spec.format in TableMatrix.TYPES:
        return TableMatrix(weight)
    if spec.format == "fp8_e4m3":
        return Float8Matrix(weight)
    if spec.format == "fp4_e2m1":
        twice = (levels_of(spec.format) * 2 + 128).byte()
        return BlockMatrix(twice[weight.codes.int()], weight.scale / 2, None, 8, spec.group_size)
    if facts["kind"] != "integer":
        raise ValueError(f"export: {name} must have a format that ONNX has a form for, got {spec.format}")
    if spec.format == "int8" and not spec.group_size and spec.x_format != "float":
        return Int8Matrix(weight)
    bits = next(width for width in _WIDTHS if width >= facts["bits"])
    offset = 2 ** (bits - 1) - facts["zero"]
    zero = None if weight.zero is None else weight.zero.float() + offset
    return BlockMatrix(weight.codes + offset, weight.scale, zero, bits, spec.group_size)


def _block_of(k: int) -> int:
    """Return the block size for a weight with one scale per channel, which is repeated for every block of a row."""
    smallest, largest = _BLOCKS
    return max(smallest, min(largest, k & -k))


def _in_blocks(
    codes: Tensor, scale: Tensor, zero: Tensor | None, group_size: int, block: int, filling: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes padded to whole blocks, and a scale and zero point for each block."""
    blocks = -(-codes.shape[1] // block)
    codes = functional.pad(codes, (0, blocks * block - codes.shape[1]), value=filling)
    if not group_size:
        scale = scale.repeat(1, blocks)
        zero = None if zero is None else zero.repeat(1, blocks)
    return codes, scale, zero


def _rows(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return ``tensor[indices]`` as one node; torch's exporter would make five."""
    shape = (*indices.shape, *tensor.shape[1:])
    return torch.onnx.ops.symbolic(
        "Gather", [tensor, indices], {"axis": 0}, dtype=tensor.dtype, shape=shape, version=13
    )


def _unpacked(packed: Tensor, bits: int, first_in_high_bits: bool = False) -> Tensor:
    """Unpack codes from bytes, ``[..., bytes]`` to float32 ``[..., codes]``. It computes in float32, because few
    runtimes can shift bytes."""
    rest, parts = packed.float(), []
    for _ in range(8 // bits - 1):
        higher = (rest / 2**bits).floor()
        parts.append(rest - higher * 2**bits)
        rest = higher
    parts.append(rest)
    return torch.stack(parts[::-1] if first_in_high_bits else parts, -1).flatten(-2)
