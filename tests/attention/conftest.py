# SPDX-License-Identifier: Apache-2.0
"""Fixtures: every row of attention_forward and attention_backward, forced; those for one dtype alone too, or of float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from row_fixture import name_or_skip

import lowbit
from lowbit import testing

KINDS = ("float32", "bfloat16", "float16")


def _forcing(op: str, *kinds: str) -> Any:
    rows = [row for row in testing.rows(op) if str(row["name"]).startswith(tuple(f"{op}_{kind}" for kind in kinds))]

    @pytest.fixture(params=rows, ids=lambda row: str(row["name"]))
    def row(request: pytest.FixtureRequest) -> Iterator[str]:
        name = name_or_skip(request.param)
        with lowbit.force_kernel(name):
            yield name

    return row


forward_row, any_forward_row = _forcing("attention_forward", "float32"), _forcing("attention_forward", *KINDS)
backward_row, any_backward_row = _forcing("attention_backward", "float32"), _forcing("attention_backward", *KINDS)
