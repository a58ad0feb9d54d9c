# SPDX-License-Identifier: Apache-2.0
"""Every kernel row against the float64 reference; rows with integer arithmetic against each other, bit for bit."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from refusals import refused_alike

from lowbit import _C, force_kernel, testing
from lowbit.ops.linear import linear
from lowbit.testing import LinearCase, assert_within, cached_data, run_linear

ROWS = [row["name"] for row in testing.rows("linear")]
CASES = testing.linear_cases(rounds=3)
INTEGER_CASES = [case for case in CASES if case.x_format.startswith("int8")]


@functools.cache
def cases_of(row: str) -> list[LinearCase]:
    return [case for case in CASES if testing.serves(row, case)]


@pytest.mark.core
def test_row_is_within_budget_of_the_float64_reference(kernel: str, subtests: pytest.Subtests) -> None:
    cases = cases_of(kernel)
    if not cases and kernel.endswith("_onednn"):
        pytest.skip(f"oneDNN {_C.onednn.facts()['version']} has no {kernel} on this machine")
    assert cases, f"no case reaches row {kernel}"
    for case in cases:
        with subtests.test(str(case)):
            data = cached_data(case)
            assert_within(run_linear(case, data, kernel), data.wanted, data.allowed, f"{kernel} {case}")


@pytest.mark.core
def test_a_packed_weight_may_lie_at_any_address(kernel: str) -> None:
    """As in a file that is mapped: few rows, which read codes as they are stored, and many."""
    for few in (True, False):
        case = next((case for case in cases_of(kernel) if (case.m < 16) == few and case.m > 0), None)
        if case is None:
            continue
        data = cached_data(case)
        room = torch.zeros(data.packed.numel() + 8, dtype=torch.uint8, device=data.packed.device)
        moved = room[8:].view(data.packed.shape).copy_(data.packed)
        assert torch.equal(run_linear(case, replace(data, packed=moved), kernel), run_linear(case, data, kernel))


def test_every_post_op_chain_is_within_budget(kernel: str, subtests: pytest.Subtests) -> None:
    """Each row has every activation with every dtype, each pair with one of the 12 (bias, mul, add); 12 rows in turn have the full product.

    All rows of an instruction set have one epilogue (cpu/linear/epilogue.hpp). oneDNN's activations are tested in tests/onednn too.
    """
    tested = 0
    ends = list(itertools.product((None, "float32", "dtype of x"), (False, True), (False, True)))
    for i, (dtype, activation) in enumerate(itertools.product(testing.DTYPES, testing.ACTIVATIONS)):
        with subtests.test(dtype=dtype, activation=activation):
            chain = ends[(i + ROWS.index(kernel)) % len(ends)]
            cases = (
                LinearCase(m, 37, 72, dtype, format, group_size, "symmetric", x_format, chain[0], activation, *chain[1:])
                for format, x_format in _formats_of(kernel)
                for m, group_size in ((5, 0), (5, 32), (70, 0), (1, 0), (1, 32))
                if _C.FORMAT_FACTS[format]["kind"] != "float" or group_size == 0
            )
            case = next((case for case in cases if testing.serves(kernel, case)), None)
            if case is None and (kernel.endswith("_onednn") or kernel.removesuffix("_sim").endswith("_bf16") and dtype != "bfloat16"):
                continue  # oneDNN has not every activation and dtype
            assert case, f"no case of {dtype} and {activation} reaches {kernel}"
            data = cached_data(case)
            assert_within(run_linear(case, data, kernel), data.wanted, data.allowed, f"{kernel} {case}")
            tested += 1
    if not tested:
        pytest.skip(f"{kernel} takes none of these calls")


@functools.cache
def _formats_of(row: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys((case.format, case.x_format) for case in cases_of(row)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format, group_size, x_format", [("int8", 0, "int8_row"), ("int4", 32, "int8_group"), ("int4", 128, "float"),
                                                           ("nf4", 64, "float"), ("fp8_e4m3", 0, "float"), ("fp8_e4m3", 32, "float8_row"),
                                                           ("int8", 0, "float"), ("bfloat16", 0, "float")])  # fmt: skip
def test_every_number_of_rows_up_to_70(format: str, group_size: int, x_format: str, dtype: str, subtests: pytest.Subtests) -> None:
    base = LinearCase(70, 33, 100, dtype, format, group_size, "symmetric", x_format, "float32")
    data = cached_data(base)
    for m in range(1, 71):
        with subtests.test(m=m):
            y = torch.ops.lowbit.linear(data.x[:m], data.packed, *base.op_args, data.bias)
            assert_within(y, data.wanted[:m], data.allowed[:m], f"m={m} {base}")


@pytest.mark.parametrize("case", INTEGER_CASES[::4], ids=str)
def test_rows_with_integer_arithmetic_agree_bit_for_bit(case: LinearCase) -> None:
    rows = [str(row["name"]) for row in testing.rows("linear") if row["available"] and row["backend"] != "onednn"]
    results = {row: run_linear(case, cached_data(case), row) for row in rows if testing.serves(row, case)}
    if len(results) < 2:
        pytest.skip(f"this machine has one row for it, {', '.join(results)}")
    first, *others = results
    for row in others:
        assert torch.equal(results[first], results[row]), f"{first} and {row} differ on {case}"


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    m=draw.integers(1, 70),
    n=draw.integers(1, 150),
    k=draw.integers(1, 400),
    dtype=draw.sampled_from(testing.DTYPES),
    format=draw.sampled_from(list(testing.format_cases())),
    post_ops=draw.sampled_from(testing.POST_OPS),
)
def test_any_call_is_within_budget(
    m: int, n: int, k: int, dtype: str, format: tuple[str, int, str, str], post_ops: tuple[str | None, str, bool, bool]
) -> None:
    case = LinearCase(m, n, k, dtype, *format, *post_ops)
    data = testing.make_data(case)
    assert_within(run_linear(case, data), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("format, group_size, x_format", (("int4", 32, "int8_group"), ("int8", 0, "float"), ("float16", 0, "float")))
def test_a_large_product_is_within_budget(format: str, group_size: int, x_format: str) -> None:
    case = LinearCase(67, 1003, 1501, "bfloat16", format, group_size, "symmetric", x_format, "float32", "silu", True, True)
    data = testing.make_data(case)
    assert_within(run_linear(case, data), data.wanted, data.allowed, str(case))


def test_leading_dimensions_and_strides_of_x_do_not_matter() -> None:
    case = LinearCase(12, 20, 70, format="int4", group_size=32, x_format="int8_group")
    data = cached_data(case)
    wanted = run_linear(case, data)
    assert torch.equal(linear(data.x.view(2, 3, 2, 70), data.packed, case.op_args).view(12, 20), wanted)
    assert torch.equal(linear(data.x.T.contiguous().T, data.packed, case.op_args), wanted)
    assert torch.equal(linear(data.x[3], data.packed, case.op_args), wanted[3])
    assert linear(data.x[:0], data.packed, case.op_args).shape == (0, 20)


def test_a_result_does_not_depend_on_the_other_rows_of_the_batch_when_arithmetic_is_integer() -> None:
    case = LinearCase(33, 48, 128, format="int4", group_size=32, x_format="int8_group")
    data = cached_data(case)
    whole = run_linear(case, data)
    alone = torch.cat([torch.ops.lowbit.linear(row[None], data.packed, *case.op_args) for row in data.x])
    assert torch.equal(whole, alone)


@pytest.mark.core
@pytest.mark.parametrize("row", [str(row["name"]) for row in testing.rows("dequantize") if row["available"] and "_panels_" in str(row["name"])])
def test_dequantize_is_the_reference_rounded_once(row: str, subtests: pytest.Subtests) -> None:
    for format, group_size, mapping, x_format in testing.format_cases():
        if x_format != "float":
            continue
        for n, k in ((1, 1), (17, 70), (33, 257)):
            with subtests.test(format=format, group_size=group_size, mapping=mapping, n=n, k=k):
                packed = testing.pack_weight(torch.randn(n, k), format, group_size, mapping)
                decoded = testing.decode_weight(packed, n, k, format, group_size, mapping)
                wanted = decoded.double() if isinstance(decoded, torch.Tensor) else decoded.decode()
                numbers = n, k, _C.FORMATS[format], group_size, mapping == "asymmetric"
                with force_kernel(row):
                    actual = torch.ops.lowbit.dequantize(packed, *numbers)
                    halves = [torch.ops.lowbit.dequantize(packed, *numbers, like=actual[:0].to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
                assert actual.dtype == torch.float32
                torch.testing.assert_close(actual.double(), wanted, rtol=2.0**-23, atol=0)
                assert all(torch.equal(half, actual.to(half.dtype)) for half in halves)


def test_dequantize_to_another_dtype_is_refused() -> None:
    packed = testing.pack_weight(torch.randn(16, 64), "int8", 0, "symmetric")
    call = {"weight": packed, "n": 16, "k": 64, "format": _C.FORMATS["int8"], "group_size": 0, "asymmetric": False, "like": torch.empty(0, dtype=torch.float64)}
    refused_alike(torch.ops.lowbit.dequantize, call, TypeError, "dequantize: the result must be float32, bfloat16 or float16, got float64")
