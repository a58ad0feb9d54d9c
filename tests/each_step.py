# SPDX-License-Identifier: Apache-2.0
"""A function that runs at each step of another one, as it may in another thread.

Threads meet at a random step of each other. Here one function is traced by opcodes, and at the n-th of them the other
one runs to its end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

CHANGING = ("quant/kinds.py", "quant/quant_linear.py", "quant/quant_embedding.py", "quant/quant_experts.py", "quant/block_sparse.py", "quant/fused.py")
CALLING = (*CHANGING, "quant/fused_norm.py", "quant/gated_mlp.py", "quant/merged.py", "models/fused_attention.py", "models/fused_layer.py", "models/fused_decoder.py", "models/layer_program.py", "models/half_steps.py", "models/growing_cache.py")  # fmt: skip


def at_each_step(
    files: tuple[str, ...], traced: Callable[[Any], Any], other: Callable[[Any], Any], made: Callable[[], Any], every: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Run ``other(thing)`` at the n-th opcode of ``traced(thing)`` in these files, for each n (or one of ``every``) and
    a new thing; yield what the two return."""
    step = 0
    while len(results := _at_step(step, files, traced, other, made())) == 2:
        yield results[0], results[1]
        step += every


def _at_step(step: int, files: tuple[str, ...], traced: Callable[[Any], Any], other: Callable[[Any], Any], thing: Any) -> list[Any]:
    """Return the result of ``traced``, and that of ``other`` if there are so many opcodes."""
    steps, results = 0, []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if steps == step:
                sys.settrace(None)
                results.append(other(thing))
            steps += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = traced(thing)
    finally:
        sys.settrace(before)
    return [result, *results]
