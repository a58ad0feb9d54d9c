# SPDX-License-Identifier: Apache-2.0
"""``torchao.sparsity`` on lowbit: `sparsify_`, 2:4 and block-sparse weights."""

from __future__ import annotations

from typing import Any

from lowbit.formats import BlockSparseWeightConfig, SemiSparseWeightConfig, block_sparse_weight, semi_sparse_weight
from lowbit.formats.torchao import missing
from lowbit.quant import sparsify_

__all__ = [
    "BlockSparseWeightConfig",
    "SemiSparseWeightConfig",
    "block_sparse_weight",
    "semi_sparse_weight",
    "sparsify_",
]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
