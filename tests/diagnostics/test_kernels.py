# SPDX-License-Identifier: Apache-2.0
"""The list of rows, and forcing one."""

from __future__ import annotations

import pytest
import torch

import lowbit
from lowbit import _C, testing
from lowbit.testing import LinearCase, cached_data, run_linear

CASE = LinearCase(5, 20, 70)


def test_rows_are_listed_best_first_and_every_machine_has_one() -> None:
    rows = lowbit.kernels("linear")
    assert rows and any(row["available"] for row in rows)
    assert all(bool(row["reason"]) != bool(row["available"]) for row in rows)
    levels = [_C.isa()["compiled"].index(row["backend"]) for row in rows if row["backend"] != "onednn"]
    assert [row["backend"] for row in rows[len(levels) :]] == ["onednn"] * (len(rows) - len(levels)), "oneDNN comes last"
    assert levels in (sorted(levels), sorted(levels, reverse=True))
    assert rows[0]["name"] in repr(rows) and "<table>" in rows._repr_html_()


def test_unknown_op_is_refused() -> None:
    with pytest.raises(ValueError, match="kernels: op must be"):
        lowbit.kernels("matmul")


def test_unknown_row_is_refused_and_the_nearest_are_listed() -> None:
    with pytest.raises(ValueError, match=r"linear_int4_avx5'.*lowbit.kernels\(\) lists, such as linear_int4_avx"), lowbit.force_kernel("linear_int4_avx5"):
        pass


def test_forced_row_runs_and_is_released(kernel: str) -> None:
    case = next((case for case in testing.linear_cases() if testing.serves(kernel, case)), None)
    if case is None and kernel.endswith("_onednn"):
        pytest.skip(f"oneDNN refuses this: {kernel} serves no case")
    assert case is not None
    data = cached_data(case)
    run_linear(case, data)
    usual = _C.last_kernel("linear")
    with lowbit.force_kernel(kernel):
        torch.ops.lowbit.linear(data.x, data.packed, *case.op_args)
        assert _C.last_kernel("linear") == kernel
    torch.ops.lowbit.linear(data.x, data.packed, *case.op_args)
    assert _C.last_kernel("linear") == usual


def test_forced_rows_nest_and_are_released_after_an_error() -> None:
    names = [str(row["name"]) for row in testing.rows() if row["available"] and testing.serves(str(row["name"]), CASE)]
    data = cached_data(CASE)
    with pytest.raises(RuntimeError, match="inside"), lowbit.force_kernel(names[0]):
        with lowbit.force_kernel(names[-1]):
            pass
        torch.ops.lowbit.linear(data.x, data.packed, *CASE.op_args)
        assert _C.last_kernel("linear") == names[0]
        raise RuntimeError("inside")
    assert _C.force_kernel(None) is None


def test_forced_row_that_does_not_fit_fails_with_its_reason(kernel: str) -> None:
    case = next((case for case in testing.linear_cases() if not testing.serves(kernel, case)), None)
    if case is None:
        pytest.skip(f"{kernel} serves every case")
    data = cached_data(case)
    with pytest.raises(NotImplementedError, match=f"linear: no kernel row fits .forced: {kernel}"), lowbit.force_kernel(kernel):
        torch.ops.lowbit.linear(data.x, data.packed, *case.op_args)


def test_row_of_a_higher_isa_is_refused_by_name() -> None:
    row = next((row for row in testing.rows() if not row["available"]), None)
    if row is None:
        pytest.skip("this machine runs every row")
    data = cached_data(CASE)
    with pytest.raises(NotImplementedError, match="no kernel row fits"), lowbit.force_kernel(str(row["name"])):
        torch.ops.lowbit.linear(data.x, data.packed, *CASE.op_args)
