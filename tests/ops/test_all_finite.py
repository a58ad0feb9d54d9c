# SPDX-License-Identifier: Apache-2.0
"""all_finite: one bad element at any place of any length is found, and no largest number is taken for one."""

from __future__ import annotations

import pytest
import torch

from lowbit import _C, force_kernel, testing

LENGTHS = (1, 2, 15, 64, 65, 4099)


@pytest.mark.core
@pytest.mark.parametrize("row", [str(row["name"]) for row in testing.rows("all_finite")])
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_one_bad_element_is_found_wherever_it_is(row: str, dtype: str, subtests: pytest.Subtests) -> None:
    of = getattr(torch, dtype)
    with force_kernel(row):
        for length in LENGTHS:
            x = torch.full((length,), torch.finfo(of).max, dtype=of) * (1 - 2 * (torch.arange(length) % 2)).to(of)
            assert _C.all_finite(x), length
            for place in {0, length // 2, length - 1}:
                for bad in (torch.inf, -torch.inf, torch.nan):
                    with subtests.test(length=length, place=place, bad=bad):
                        spoiled = x.clone()
                        spoiled[place] = bad
                        assert not _C.all_finite(spoiled), (length, place, bad)
    assert _C.last_kernel("all_finite") == row
