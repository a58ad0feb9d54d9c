# SPDX-License-Identifier: Apache-2.0
"""torchao's API on lowbit: replace ``torchao`` by ``lowbit.peers.torchao`` in the imports of a program.

Example:
    >>> from lowbit.peers.torchao import quantize_
    >>> from lowbit.peers.torchao.quantization import Int8WeightOnlyConfig, PerGroup
    >>> from lowbit.peers.torchao.optim import AdamW8bit
    >>> quantize_(model, Int8WeightOnlyConfig(granularity=PerGroup(128)))

A torchao name that lowbit does not have raises an error that suggests a replacement. torchao need not be installed.
"""

from __future__ import annotations

from lowbit.peers.torchao import optim, quantization, sparsity
from lowbit.peers.torchao.quantization import quantize_
from lowbit.peers.torchao.weights import from_torchao

__all__ = ["from_torchao", "optim", "quantization", "quantize_", "sparsity"]
