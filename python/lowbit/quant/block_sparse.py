# SPDX-License-Identifier: Apache-2.0
"""BlockSparseLinear, an nn.Linear that stores only the nonzero square blocks of its weight, and conversion to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.block_sparse import BlockSparseWeightConfig
from lowbit.formats.float import FLOAT_FORMATS
from lowbit.ops.block_sparse_linear import block_sparse_linear, blocks_of, dense_of_blocks
from lowbit.quant.kinds import become_float, become_packed, features_of, float_forward, twin_of
from lowbit.quant.packing import Selected
from lowbit.quant.report import ReportRow, decibel

INDICES = ("crow_indices", "col_indices")


@dataclass(frozen=True)
class Blocks:
    """The stored blocks of a weight ``[n, k]``, named as in torch's BSR layout.

    Args:
        values: ``[blocks, size, size]``, row by row.
        crow_indices: int32 ``[n / size + 1]``, the index of the first block in each row of blocks, and at the end the
            total number of blocks.
        col_indices: int32 ``[blocks]``, the block column of each block, ascending within a row.
    """

    values: Tensor
    crow_indices: Tensor
    col_indices: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, config: BlockSparseWeightConfig) -> Blocks:
        """Split a weight into blocks, and drop the zero blocks and those with the smallest norm.

        ``config.sparsity`` is the fraction to drop. Of blocks with equal norms the earlier one is kept.
        """
        blocks = blocks_of(weight, config.blocksize)
        kept = (blocks != 0).any(-1).any(-1)
        if config.sparsity is not None:
            squares = torch.linalg.vector_norm(blocks, dim=(2, 3), dtype=torch.float64)
            count = kept.numel() - round(config.sparsity * kept.numel())
            largest = squares.flatten().sort(descending=True, stable=True).indices[:count]
            kept &= torch.zeros_like(kept).flatten().index_fill(0, largest, True).view_as(kept)
        crow_indices = nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
        return cls(blocks[kept].contiguous(), crow_indices.int(), kept.nonzero()[:, 1].int())

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.crow_indices.nbytes + self.col_indices.nbytes


class BlockSparseLinear(nn.Linear):
    """A linear layer ``y = x @ w.T + bias`` that stores and multiplies only the nonzero blocks of w.

    ``lowbit.sparsify_`` turns an nn.Linear into one. The parameter ``weight`` is ``[blocks, size, size]`` in the
    layer's dtype. It can be trained; blocks that are not stored stay 0. The int32 buffers ``crow_indices`` and
    ``col_indices`` are those of torch's BSR layout.
    """

    crow_indices: Tensor
    col_indices: Tensor
    float_class: type[nn.Module] = nn.Linear
    """The class before packing, which ``dequantize_`` restores."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("BlockSparseLinear: lowbit.sparsify_(model, lowbit.block_sparse_weight()) makes one of a layer")

    def forward(self, x: Tensor) -> Tensor:
        inside = self.__dict__
        parameters, buffers = inside["_parameters"], inside["_buffers"]
        if INDICES[0] not in buffers:
            return float_forward(self, x)
        return block_sparse_linear(
            x, parameters["weight"], buffers["crow_indices"], buffers["col_indices"], parameters["bias"]
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense weight ``[n, k]``, by default in the layer's dtype."""
        return dense_of_blocks(self.weight.detach(), self.crow_indices, self.col_indices, self.in_features).to(dtype)

    def become_linear(self, weight: nn.Parameter) -> None:
        """Turn this layer back into its former class, in place.

        Args:
            weight: the dense weight, transposed if the former class stores it so.
        """
        twin = twin_of(self, self.float_class)
        twin._parameters["weight"] = weight
        for name in INDICES:
            del twin._buffers[name]
        for name in () if isinstance(twin, nn.Linear) else ("out_features", "in_features"):
            del twin.__dict__[name]
        become_float(self, twin)

    def reset_parameters(self) -> None:
        raise RuntimeError("BlockSparseLinear: its blocks have no initial value; load a state dict or use sparsify_")

    def extra_repr(self) -> str:
        size = self.weight.shape[1]
        all_of_them = self.out_features // size * (self.in_features // size)
        return f"{super().extra_repr()}, {len(self.weight)} of {all_of_them} blocks of {size}"

    def state_dict_problem(self, state_dict: Mapping[str, Any], prefix: str) -> str | None:
        """Return the reason why the entries of ``state_dict`` under ``prefix`` do not fit this layer, or None. Missing
        entries are left to torch."""
        if problem := blocks_problem(state_dict, prefix, *features_of(self)):
            return problem
        weight = state_dict.get(f"{prefix}weight")
        if weight is None or weight.shape == self.weight.shape:
            return None
        return (
            f"{prefix}weight must have shape {list(self.weight.shape)}, got {list(weight.shape)}; "
            "lowbit.load takes other blocks into the float model"
        )


def blocks_problem(state_dict: Mapping[str, Any], prefix: str, n: int, k: int) -> str | None:
    """Return the reason why the blocks of ``state_dict`` under ``prefix`` do not form a weight ``[n, k]``, or None."""
    entries = [state_dict.get(f"{prefix}{name}") for name in ("weight", *INDICES)]
    if any(entry is None for entry in entries):
        return None
    weight, crow_indices, col_indices = entries
    wanted = f"{prefix}weight must be the blocks [blocks, size, size] of a weight [{n}, {k}]"
    if weight.dim() != 3 or weight.shape[1] != weight.shape[2] or weight.dtype not in FLOAT_FORMATS:
        return f"{wanted}, got {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
    count, size, _ = weight.shape
    if size < 16 or size % 16 or n % size or k % size:
        return f"{wanted}, got blocks of {size}"
    for name, tensor, shape in zip(INDICES, (crow_indices, col_indices), ([n // size + 1], [count]), strict=True):
        if tensor.dtype != torch.int32 or list(tensor.shape) != shape:
            got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            return f"{prefix}{name} must be int32 {shape}, got {got}"
    if crow_indices.is_meta:
        return None
    if crow_indices[0] != 0 or crow_indices[-1] != count or (crow_indices.diff() < 0).any():
        return f"{prefix}crow_indices must rise from 0 to {count}, the number of blocks"
    if count and (int(col_indices.min()) < 0 or int(col_indices.max()) >= k // size):
        got = f"{int(col_indices.min())} to {int(col_indices.max())}"
        return f"{prefix}col_indices must be 0 to {k // size - 1}, got {got}"
    return None


def hold_blocks(module: nn.Module, weight: nn.Parameter, blocks: Blocks) -> None:
    """Turn a float layer, or a BlockSparseLinear with other blocks, into a BlockSparseLinear with these, in place."""
    twin = twin_of(module, BlockSparseLinear)
    twin.out_features, twin.in_features = features_of(module)
    twin._parameters["weight"] = weight
    for name in INDICES:
        twin.register_buffer(name, getattr(blocks, name))
    become_packed(module, twin)


def sparsify_layers(groups: list[list[Selected]], config: BlockSparseWeightConfig) -> list[ReportRow]:
    """Turn the layers into BlockSparseLinear, and return their report rows. The layers of a group share a weight, and
    therefore its blocks."""
    rows = []
    for group in groups:
        first = group[0]
        weight = first.value
        matrix = first.weight.matrix(weight.detach())
        blocks = Blocks.of(matrix, config)
        row = _row_of(first, matrix, blocks)
        parameter = nn.Parameter(blocks.values, requires_grad=weight.requires_grad)
        for item in group:
            hold_blocks(item.module, parameter, blocks)
        rows += [row, *(row.shared(item.name, row.format, row.kernel) for item in group[1:])]
    return rows


def _row_of(item: Selected, matrix: Tensor, blocks: Blocks) -> ReportRow:
    count, size, _ = blocks.values.shape
    kept = dense_of_blocks(blocks.values, blocks.crow_indices, blocks.col_indices, matrix.shape[1])
    signal, noise = (float(tensor.double().square().sum()) for tensor in (matrix, matrix - kept))
    share = 100 * count * size * size / matrix.numel()
    name = f"{FLOAT_FORMATS[matrix.dtype]}, {share:.0f} % of blocks of {size}"
    before, after, db = matrix.nbytes, blocks.nbytes, decibel(signal, noise)
    return ReportRow(item.name, name, item.weight.shape, before, after, db, note=item.note)
