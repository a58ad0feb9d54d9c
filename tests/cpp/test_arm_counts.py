# SPDX-License-Identifier: Apache-2.0
"""The cycles of Arm's inner loops as docs/measured/arm.md has them: llvm-mca counts them again from today's object code."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = runpy.run_path(str(ROOT / "benchmarks/arm/count.py"))
# Products per cycle of two rows: 32 bytes by smmla and so on, times the vector units of the processor that take them.
UNITS = {"neoverse-n1": 2, "neoverse-n2": 2, "neoverse-v2": 4}
MANY_ROWS = ("int4 x int8, 6 rows, no groups", "int8, many rows", "bfloat16, many rows", "float32, 6 rows")


def test_loops_take_the_cycles_that_the_page_says() -> None:
    if COUNT["missing"]():
        pytest.skip(COUNT["missing"]())
    wanted = json.loads((ROOT / "benchmarks/arm/counts.json").read_text())["ours"]
    got = COUNT["ours"]()
    assert [loop["loop"] for loop in got] == [loop["loop"] for loop in wanted]
    for now, before in zip(got, wanted, strict=True):
        for processor, cycles in before["cycles"].items():
            # Another patch release of the compiler may move an instruction.
            assert now["cycles"][processor] <= 1.02 * cycles, (now["loop"], processor)


def test_many_rows_reach_85_percent_of_the_units_peak() -> None:
    counts = {loop["loop"]: loop for loop in json.loads((ROOT / "benchmarks/arm/counts.json").read_text())["ours"]}
    for name in MANY_ROWS:
        loop = counts[name]
        [product] = COUNT["PRODUCTS"].keys() & loop.keys()
        for processor, units in UNITS.items():
            assert loop[product] / units >= 0.85 * loop["cycles"][processor], (name, processor)
