# SPDX-License-Identifier: Apache-2.0
"""Block-sparse float weights: blocks of zeros are neither stored nor multiplied."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockSparseWeightConfig:
    """Store those square blocks of each weight that are not all 0, in the weight's own dtype, for ``sparsify_``.

    torchao's of this name, with more dtypes and devices.

    Args:
        blocksize: rows and columns of a block, a multiple of 16; from 32 on bfloat16 is multiplied by tile units.
        sparsity: the share of blocks that become 0, from 0 up to, not including, 1: those with the least squares, of
            each weight by itself. None: the weights are pruned already, and no block is lost.

    Raises:
        ValueError: an argument has none of the values that it may have; names it.

    Example:
        >>> lowbit.sparsify_(model, lowbit.block_sparse_weight(64, sparsity=0.8))
    """

    blocksize: int = 64
    _: KW_ONLY
    sparsity: float | None = None

    def __post_init__(self) -> None:
        size, sparsity = self.blocksize, self.sparsity
        if not isinstance(size, int) or isinstance(size, bool) or size < 16 or size % 16:
            raise ValueError(f"block_sparse_weight: blocksize must be a multiple of 16, got blocksize={size!r}")
        number = isinstance(sparsity, (int, float)) and not isinstance(sparsity, bool)
        if sparsity is not None and not (number and 0 <= sparsity < 1):
            raise ValueError(
                f"block_sparse_weight: sparsity must be None or from 0 up to below 1, got sparsity={sparsity!r}"
            )

    def refuses(self, weight: Tensor) -> str:
        """Why a weight ``[n, k]`` cannot be cut into blocks, or an empty string."""
        if any(size % self.blocksize for size in weight.shape):
            n, k = weight.shape
            return f"must have out_features and in_features in blocks of {self.blocksize}, got {n} and {k}"
        return "must hold values, got one on the meta device" if weight.is_meta else ""


block_sparse_weight = BlockSparseWeightConfig
