# SPDX-License-Identifier: Apache-2.0
"""The rows of oneDNN and what each multiplies."""

from __future__ import annotations

import pytest

from lowbit import _C, testing
from lowbit.testing import LinearCase

FORMATS = {
    "linear_float32_onednn": [("float32", "float32", 0, "float")],
    "linear_bfloat16_onednn": [(dtype, "bfloat16", 0, "float") for dtype in ("bfloat16", "float32")],
    "linear_float16_onednn": [(dtype, "float16", 0, "float") for dtype in ("float32", "float16")],
    "linear_int8_int8_onednn": [(dtype, "int8", 0, x) for dtype in ("float32", "bfloat16") for x in ("int8_row", "int8_group")],
    **{
        f"linear_{format}_onednn": [
            *((dtype, format, 0, "float") for dtype in testing.DTYPES),
            *(("float32", format, group_size, "float") for group_size in (32, 64, 128)),
        ]
        for format in ("int8", "int4")
    },
}
"""(dtype of x, weight, group size, x_format) of each row, the one first that most versions and machines have."""


def case_of(row: str, sizes: tuple[int, int, int] = (5, 37, 70), at: int = 0, **more: object) -> LinearCase:
    dtype, format, group_size, x_format = FORMATS[row][at]
    return LinearCase(*sizes, dtype, format, group_size, "symmetric", x_format, **more)  # type: ignore[arg-type]


def served(row: str) -> list[int]:
    """Which of FORMATS[row] the library multiplies on this machine, for few rows of x and for many."""
    ats = range(len(FORMATS[row]))
    return [at for at in ats if all(testing.serves(row, case_of(row, (m, 37, 70), at)) for m in (5, 40))]


def needs_onednn() -> None:
    if reason := _C.onednn.facts()["reason"]:
        pytest.skip(reason)


def needs_row(row: str) -> None:
    needs_onednn()
    if not served(row):
        pytest.skip(f"oneDNN {_C.onednn.facts()['version']} has no {row} on this machine")
