# SPDX-License-Identifier: Apache-2.0
"""quantize and dequantize: what a packed weight holds is within half a step of the weight, in any shape and under any setting."""

from __future__ import annotations

from lowbit import testing

from ..choices import Choices
from ..tensors import header, layout, normal

_FORMATS = tuple({(format, group_size, mapping) for format, group_size, mapping, _ in testing.format_cases()})


def generate(choices: Choices) -> str:
    c = choices
    format, group_size, mapping = c.pick(*sorted(_FORMATS))
    n, k = c.pick(1, 7, 16, 17, 33), c.pick(32, 1, 3, 33, 64, 65, 100, 257)
    dtype = c.pick("float32", "bfloat16", "float16")
    weight = layout(c, lambda sizes: normal(sizes, dtype), [n, k])
    factor = c.pick("1", "0", "1e-3", "100", "1e-6")
    under = c.pick("", "", "", "default dtype float64", "default dtype bfloat16", "threads 2", "default device meta")
    return (
        f"{header(c)}check.quantized(({weight}) * {factor}, {format!r}, {group_size}, {mapping!r}, under={under!r})\n"
    )
