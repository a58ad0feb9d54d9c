# SPDX-License-Identifier: Apache-2.0
"""oneDNN's rows of linear against float64, and what they refuse. tests/ops walks them too, as every row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from onednn_cases import FORMATS, case_of, needs_row, served

import lowbit
from lowbit import _C
from lowbit.testing import LinearCase, assert_within, cached_data, make_data, run_linear

SIZES = ((1, 7, 3), (1, 64, 128), (5, 37, 70), (16, 48, 64), (17, 97, 257), (33, 130, 192), (70, 16, 100), (3, 40, 1100))
FUSED = ("none", "gelu_tanh", "silu")


def test_every_chain_is_within_budget_at_every_size(row: str) -> None:
    for at, activation in itertools.product(served(row), FUSED):
        ends = itertools.cycle(itertools.product((None, "float32", "dtype of x"), (False, True), (False, True)))
        for sizes, (bias, mul, add) in zip(SIZES * 2, ends, strict=False):
            case = case_of(row, sizes, at, bias=bias, activation=activation, mul=mul, add=add)
            data = cached_data(case)
            assert_within(run_linear(case, data, row), data.wanted, data.allowed, f"{row} {case}")


def test_a_bias_of_float16_is_added() -> None:
    case = LinearCase(5, 37, 70, "float32", "int8", 0, "symmetric", "int8_row")
    needs_row("linear_int8_int8_onednn")
    bias = torch.randn(37).half()
    data, with_bias = make_data(case), dataclasses.replace(make_data(case), bias=bias)
    wanted = data.wanted + bias.double()
    allowed = data.allowed + 2.0**-23 * (data.wanted.abs() + bias.double().abs())
    assert_within(run_linear(case, with_bias, "linear_int8_int8_onednn"), wanted, allowed)


def test_codes_give_the_bits_that_rows_of_lowbit_give(onednn: None) -> None:
    row = "linear_int8_int8_onednn"
    for sizes, at, (bias, mul, add) in itertools.product(SIZES, served(row), ((None, False, False), ("float32", True, True))):
        case = case_of(row, sizes, at, bias=bias, mul=mul, add=add)
        data = cached_data(case)
        assert torch.equal(run_linear(case, data, row), run_linear(case, data)), str(case)
        assert _C.last_kernel("linear") != row


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_reaches_its_row_and_no_other(row: str, bad: float) -> None:
    for activation, k in itertools.product(FUSED, (64, 70)):
        case = case_of(row, (20, 37, k), activation=activation)
        x = torch.randn(20, k)
        x[7, 2] = bad
        data = make_data(case, x.to(getattr(torch, case.dtype)), torch.randn(37, k))
        y = run_linear(case, data, row)
        others = [i for i in range(20) if i != 7]
        assert_within(y[others], data.wanted[others], data.allowed[others], str(case))
        if bad != bad or "int8_int8" in row:  # of inf, silu and gelu_tanh make 0 and inf as the reference does
            assert not y[7].isfinite().any(), str(case)
        else:
            assert torch.equal(y[7].isfinite(), data.wanted[7].isfinite()), str(case)


def test_nothing_is_read_behind_a_tensor(onednn: None, python: Callable[..., str]) -> None:
    folder = Path(__file__).parent
    code = f"import runpy, sys; sys.path.insert(0, {str(folder)!r}); runpy.run_path({str(folder / 'guarded_tensors.py')!r}, run_name='__main__')"
    assert int(python(code)) == 27 * sum(len(served(row)) for row in FORMATS)


REFUSED = {
    "relu": ({"activation": "relu"}, "relu of oneDNN makes 0 of nan"),
    "gelu": ({"activation": "gelu"}, "gelu of oneDNN makes nan of inf"),
    "another format": ({"format": "nf4", "x_format": "float", "group_size": 64}, "another weight format"),
}
REFUSED_BY_ONE = [
    ("linear_float32_onednn", {"dtype": "bfloat16"}, "activations of its own dtype or float32"),
    ("linear_bfloat16_onednn", {"dtype": "float16"}, "activations of its own dtype or float32"),
    ("linear_float16_onednn", {"dtype": "bfloat16"}, "activations of its own dtype or float32"),
    ("linear_int4_onednn", {"x_format": "int8_row"}, "activations as codes"),
    ("linear_int4_onednn", {"mapping": "asymmetric"}, "zero points are float16 here"),
    ("linear_int8_onednn", {"dtype": "bfloat16", "group_size": 32}, "rounds a weight of groups to 16 bits"),
    ("linear_int8_int8_onednn", {"x_format": "float"}, "float activations"),
    ("linear_int8_int8_onednn", {"group_size": 32}, "no scales of groups"),
    ("linear_int8_int8_onednn", {"mapping": "asymmetric"}, "asymmetric codes"),
    ("linear_int8_int8_onednn", {"x_format": "int8_row_asymmetric"}, "asymmetric codes"),
    ("linear_int8_int8_onednn", {"k": 131136}, "an int32 cannot hold the sum"),
]


@pytest.mark.parametrize("change, reason", REFUSED.values(), ids=list(REFUSED))
def test_what_differs_is_refused_in_words(row: str, change: dict[str, str], reason: str) -> None:
    case = dataclasses.replace(case_of(row), **change)
    with pytest.raises(NotImplementedError, match=f"forced: {row}.*\n.*{reason}"):
        run_linear(case, make_data(case), row)


@pytest.mark.parametrize("row_, change, reason", REFUSED_BY_ONE)
def test_what_one_row_refuses(onednn: None, row_: str, change: dict[str, object], reason: str) -> None:
    case = dataclasses.replace(case_of(row_), **change)  # type: ignore[arg-type]
    arguments = (case.m, *case.op_args, case.dtype)
    (said,) = [row["reason"] for row in _C.explain_linear(*arguments) if row["name"] == row_]
    assert reason in said


def test_a_layer_prefers_it_and_explain_names_it(onednn: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 64))
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight())
    x = torch.randn(9, 96)
    wanted = model(x)
    usual = _C.last_kernel("linear")
    model[0].prefer("linear_int8_int8_onednn")
    assert torch.equal(model(x), wanted) and _C.last_kernel("linear") == "linear_int8_int8_onednn" != usual
    assert lowbit.explain(model, m=9)[0].row == "linear_int8_int8_onednn"
