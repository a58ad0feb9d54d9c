# SPDX-License-Identifier: Apache-2.0
"""The checks that a case calls: each runs lowbit, and raises unless the results are those of float64 torch."""

from __future__ import annotations

from tests.settings import ambient, in_child, in_thread

from .attention import attention, flex, flex_now, sdpa
from .caches import cache, decode
from .compare import Wrong, refused, within
from .library import alibi, block_diffusion, mask, softcap
from .linears import feature_size, large_k, linear, quantized
from .optimizers import dynamic_map, loads, refuses_state, same_as_fresh, trains
from .processes import forks_during_the_first_call, forks_while_a_thread_traces, no_crash
from .programs import hostile, program

__all__ = [
    "Wrong", "alibi", "ambient", "attention", "block_diffusion", "cache", "decode", "dynamic_map", "feature_size", "flex", "flex_now", "forks_during_the_first_call", "forks_while_a_thread_traces", "hostile", "in_child", "in_thread", "large_k", "linear", "loads", "mask", "no_crash",
    "program", "quantized", "refused", "refuses_state", "same_as_fresh", "sdpa", "softcap", "trains", "within",
]  # fmt: skip
