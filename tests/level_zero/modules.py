# SPDX-License-Identifier: Apache-2.0
"""The SPIR-V modules of csrc/level_zero as tests compile them: specialised as csrc/level_zero/runtime does it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from lowbit import _C
from lowbit.testing import LinearCase

ROOT = Path(__file__).parents[2]


def specialised(name: str, constants: Sequence[int]) -> bytes:
    """The module with these values of its OpSpecConstants."""
    data = _C.level_zero.module(name)
    words, numbers, at = list(struct.unpack(f"<{len(data) // 4}I", data)), {}, 5
    while at < len(words):
        count, operation = words[at] >> 16, words[at] & 0xFFFF
        if operation == 71 and words[at + 2] == 1:  # OpDecorate SpecId
            numbers[words[at + 1]] = words[at + 3]
        if operation == 50 and words[at + 2] in numbers:
            words[at + 3] = constants[numbers[words[at + 2]]]
        at += count
    return struct.pack(f"<{len(words)}I", *words)


def x_parts(case: LinearCase) -> int:
    """Parts of bfloat16 in an activation of the call; 0: codes."""
    if case.x_format.startswith("int8"):
        return 0
    return 1 if case.x_format == "float8_row" else {"float32": 3, "float16": 2, "bfloat16": 1}[case.dtype]


def scales_per_tile(case: LinearCase) -> int:
    if _C.FORMAT_FACTS[case.format]["kind"] == "float":
        return 0
    return max(1, 64 // case.group_size) if case.group_size else int(case.asymmetric)


def constants_of(case: LinearCase) -> list[int]:
    """The constants that a call of linear specialises its module for (csrc/level_zero/linear/constants.hpp)."""
    kind, bits = _C.FORMAT_FACTS[case.format]["kind"], _C.FORMAT_FACTS[case.format]["bits"]
    parts = {"float32": 3, "float16": 2, "nf4": 3, "fp4": 3}.get(case.format, 1)
    return [
        bits, parts, x_parts(case), scales_per_tile(case), int(case.asymmetric), int(kind == "float"),
        int(case.format == "bfloat16"), int(kind == "lookup" and bits == 4), int(case.format == "fp8_e4m3"),
    ]  # fmt: skip


def linear_module(case: LinearCase, unit: str) -> bytes:
    """The module of a call, specialised. unit: dpas8, dpas16 or portable."""
    return specialised(f"linear_{'floats' if x_parts(case) else 'codes'}_{unit}", constants_of(case))
