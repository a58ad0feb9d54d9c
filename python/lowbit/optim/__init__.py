# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose state takes a quarter or an eighth of the memory of Adam's, with steps at memory speed on the CPU.

Example:
    >>> optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-3)
"""

from lowbit.optim.adamw import Adam4bit, Adam8bit, AdamFp8, AdamW, AdamW4bit, AdamW8bit, AdamWFp8
from lowbit.optim.chained import ChainedOptimizer, split_for_muon
from lowbit.optim.cpu_offload import CPUOffloadOptimizer
from lowbit.optim.lion import Lion8bit
from lowbit.optim.muon import Muon, Muon8bit
from lowbit.optim.sgd import SGD8bit

__all__ = [
    "Adam4bit", "Adam8bit", "AdamFp8", "AdamW", "AdamW4bit", "AdamW8bit", "AdamWFp8",
    "CPUOffloadOptimizer", "ChainedOptimizer", "Lion8bit", "Muon", "Muon8bit", "SGD8bit", "split_for_muon",
]  # fmt: skip
