# SPDX-License-Identifier: Apache-2.0
"""Block-sparse float weights: blocks that contain only zeros are neither stored nor multiplied."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockSparseWeightConfig:
    """Configuration of `sparsify_` that stores only the nonzero square blocks of each weight, in the weight's dtype.

    torchao has a configuration of the same name; this one supports more dtypes and devices.

    Args:
        blocksize: rows and columns of a block, a multiple of 16. From 32 on, bfloat16 uses the processor's tile units.
        sparsity: the fraction of blocks that is set to 0, at least 0 and below 1. In each weight, the blocks with the
            smallest norm are set to 0. None: the weights are pruned already, and every nonzero block is kept.

    Raises:
        ValueError: an argument is outside its accepted values; the message names it.

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
        """Return the reason why a weight ``[n, k]`` cannot be split into blocks, or an empty string."""
        if any(size % self.blocksize for size in weight.shape):
            n, k = weight.shape
            return f"must have out_features and in_features in blocks of {self.blocksize}, got {n} and {k}"
        return "must hold values, got one on the meta device" if weight.is_meta else ""


block_sparse_weight = BlockSparseWeightConfig
