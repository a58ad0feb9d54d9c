# SPDX-License-Identifier: Apache-2.0
"""What a calibration on text of the model's own costs, told before it starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

import torch

from lowbit.formats.algorithms import GPTQ
from lowbit.quant.input_moments import InputMoments, bytes_after
from lowbit.quant.own_text import TEXTS, TOKENS
from lowbit.quant.packing import Selected

TOLD_FROM_S = 5.0
TOLD_FROM_BYTES = 2e9


def tell_cost(selected: Sequence[Selected]) -> None:
    """Print to the standard error about how many seconds and how much memory the text, or the second moments of these
    layers' inputs and GPTQ, will take, if it is more than ``TOLD_FROM_S`` seconds."""
    operations = moments = codes = weights = 0.0
    for item in selected:
        n, k, matrices = item.weight.n, item.weight.k, item.weight.experts or 1
        operations += TEXTS * TOKENS * n * k  # twice in 8 bits: written token by token, and then read as a whole
        weights += item.value.nbytes
        codes += n * k * matrices  # of the copy that writes
        if isinstance(item.spec.algorithm, GPTQ):
            rows = TEXTS * TOKENS * _experts_of_a_token(item)  # of all matrices together
            moments += 4 * k * min(k * matrices, rows)
            operations += rows * k * k + (k**3 / 3 + 1.5 * n * k * k) * matrices
    seconds = operations / _operations_per_second() + TOKENS * weights / _BYTES_PER_SECOND
    if seconds >= TOLD_FROM_S:
        told = f"about {seconds:.0f} s, and at most {(moments + codes) / 1e9:.1f} GB beside the model"
        print(
            f"quantize_: calibration='self' takes {told}; calibration=None takes neither", file=sys.stderr, flush=True
        )


def _experts_of_a_token(item: Selected) -> int:
    """Return how many of a layer's experts a token has, as far as its configuration says; otherwise all."""
    if item.weight.experts is None:
        return 1
    told = getattr(getattr(item.module, "config", None), "num_experts_per_tok", None)
    return told if isinstance(told, int) else item.weight.experts


def tell_moments(first: Iterable[InputMoments], batches: int) -> None:
    """Print to the standard error how much memory the second moments of inputs will take, if it is more than
    ``TOLD_FROM_BYTES``.

    Args:
        first: the moments after the first batch.
        batches: the number of batches.
    """
    size = bytes_after(first, batches)
    if size > TOLD_FROM_BYTES:
        told = f"about {size / 1e9:.1f} GB beside the model, and less if filter_fn takes some layers at a time"
        print(f"calibrate: the inputs of the layers take {told}", file=sys.stderr, flush=True)


_BYTES_PER_SECOND = 10e9
"""A modest bandwidth of memory: the weights are read once for each token that is written."""


def _operations_per_second() -> float:
    """Return how many additions and multiplications of float32 matrix products this machine does in a second."""
    matrix = torch.ones(768, 768, dtype=torch.float32, device="cpu")
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - begin)
    return 2 * 768**3 / best
