# SPDX-License-Identifier: Apache-2.0
"""oneDNN's row of linear against float64, and what it refuses. tests/ops walks it too, as every row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import _C
from lowbit.testing import LinearCase, assert_within, cached_data, make_data, run_linear

ROW = "linear_float32_onednn"
SIZES = ((1, 7, 3), (1, 64, 128), (5, 37, 70), (16, 48, 64), (17, 97, 257), (33, 130, 192), (70, 16, 100), (3, 40, 1100))


@pytest.mark.parametrize("activation", ["none", "gelu_tanh", "silu"])
def test_every_chain_is_within_budget_at_every_size(onednn: None, activation: str, subtests: pytest.Subtests) -> None:
    ends = itertools.cycle(itertools.product((None, "float32", "dtype of x"), (False, True), (False, True)))
    for sizes, (bias, mul, add) in zip(SIZES * 2, ends, strict=False):
        with subtests.test(sizes=sizes, bias=bias, mul=mul, add=add):
            case = LinearCase(*sizes, "float32", "float32", bias=bias, activation=activation, mul=mul, add=add)
            data = cached_data(case)
            assert_within(run_linear(case, data, ROW), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_of_16_bits_is_added(onednn: None, dtype: torch.dtype) -> None:
    case = LinearCase(5, 37, 70, "float32", "float32")
    bias = torch.randn(37).to(dtype)
    data, with_bias = make_data(case), dataclasses.replace(make_data(case), bias=bias)
    wanted = data.wanted + bias.double()
    allowed = data.allowed + 2.0**-23 * (data.wanted.abs() + bias.double().abs())
    assert_within(run_linear(case, with_bias, ROW), wanted, allowed)


@pytest.mark.parametrize("k", (64, 70))
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("activation", ["none", "gelu_tanh", "silu"])
def test_what_is_not_finite_reaches_its_row_and_no_other(onednn: None, activation: str, bad: float, k: int) -> None:
    case = LinearCase(20, 37, k, "float32", "float32", activation=activation)
    x = torch.randn(20, k)
    x[7, 2] = bad
    data = make_data(case, x, torch.randn(37, k))
    y = run_linear(case, data, ROW)
    others = [i for i in range(20) if i != 7]
    assert_within(y[others], data.wanted[others], data.allowed[others], str(case))
    # Of inf, silu and gelu_tanh make 0 and inf as the reference does.
    assert torch.equal(y[7].isfinite(), data.wanted[7].isfinite()) and (bad == bad or not y[7].isfinite().any())


def test_nothing_is_read_behind_a_tensor(onednn: None, python: Callable[..., str]) -> None:
    code = f"import runpy; runpy.run_path({str(Path(__file__).parent / 'guarded_tensors.py')!r}, run_name='__main__')"
    assert int(python(code)) == 27


REFUSED = [
    ({"activation": "relu"}, "relu of oneDNN makes 0 of nan"),
    ({"activation": "gelu"}, "gelu of oneDNN makes nan of inf"),
    ({"format": "nf4", "group_size": 64}, "another weight format"),
    ({"format": "bfloat16"}, "another weight format"),
    ({"dtype": "bfloat16"}, "activations that are not float32"),
]


@pytest.mark.parametrize("change, reason", REFUSED)
def test_what_it_does_not_do_is_refused_in_words(change: dict[str, object], reason: str) -> None:
    if unavailable := _C.onednn.facts()["reason"]:
        pytest.skip(unavailable)
    case = dataclasses.replace(LinearCase(5, 37, 70, "float32", "float32"), **change)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=f"forced: {ROW}.*\n.*{reason}"):
        run_linear(case, make_data(case), ROW)


def test_a_layer_prefers_it_and_explain_names_it(onednn: None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 64))
    lowbit.quantize_(model, lowbit.float_weight())
    x = torch.randn(9, 96)
    wanted = model(x)
    usual = _C.last_kernel("linear")
    model[0].prefer(ROW)
    torch.testing.assert_close(model(x), wanted)
    assert _C.last_kernel("linear") == ROW != usual
    assert lowbit.explain(model, m=9)[0].row == ROW
