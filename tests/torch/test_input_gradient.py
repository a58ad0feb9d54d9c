# SPDX-License-Identifier: Apache-2.0
"""The gradient to the input of a weight that is decoded in slices: that of the whole weight, in float32 and bfloat16."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lowbit import _C, testing
from lowbit.ops import input_gradient as module
from lowbit.ops.linear import linear
from lowbit.testing import LinearCase, cached_data

CASES = [("int8", 0, "symmetric"), ("int4", 32, "asymmetric"), ("nf4", 64, "symmetric"), ("float32", 0, "symmetric")]


def case_of(format: str, group_size: int, mapping: str, dtype: str) -> LinearCase:
    return LinearCase(5, 70, 100, dtype, format, group_size, mapping)  # 5 panels, the last of 6 columns


def dense(case: LinearCase) -> torch.Tensor:
    return torch.ops.lowbit.dequantize(cached_data(case).packed, *case.op_args[:-1]).double()


@pytest.fixture(params=[True, False], ids=["bfloat16 products", "float32 products"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As on a CPU with bfloat16 products, and on one without: torch has both everywhere."""
    monkeypatch.setattr(module, "BFLOAT16_PRODUCTS", request.param)
    return request.param


@pytest.mark.parametrize("panels", [1, 2, 4, 5])
@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("format, group_size, mapping", CASES)
def test_slices_give_the_gradient_of_float64(
    format: str, group_size: int, mapping: str, dtype: str, panels: int, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE", 16 * 100 * panels)
    case = case_of(format, group_size, mapping, dtype)
    x = cached_data(case).x[None].clone().requires_grad_()
    y = linear(x, cached_data(case).packed, case.op_args)
    grad = torch.randn(y.shape).to(y.dtype)
    y.backward(grad)
    w = dense(case)
    wanted, size = grad.double() @ w, grad.double().abs() @ w.abs()
    # the gradient is rounded once to its dtype, each weight once to bfloat16, and sums are float32
    rounded = testing.ROUNDOFF[dtype] * wanted.abs() + 70 * testing.ROUNDOFF["float32"] * size
    if products and dtype == "bfloat16":
        rounded += testing.ROUNDOFF["bfloat16"] * size
    assert bool(((x.grad.double() - wanted).abs() <= 1.01 * rounded + 1e-30).all())


def test_slices_are_differentiated_again_and_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("int8", 0, "symmetric", "float32")
    data = cached_data(case)

    def results() -> list[torch.Tensor]:
        x = data.x.clone().requires_grad_()
        y = linear(x, data.packed, case.op_args).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        mapped = torch.func.vmap(torch.func.grad(lambda row: linear(row, data.packed, case.op_args).square().sum()))(
            data.x
        )
        return [first, second, mapped]

    whole = results()
    monkeypatch.setattr(module, "_SLICE", 1)
    for ours, wanted in zip(results(), whole, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_which_product_is_taken_is_a_matter_of_the_instruction_set() -> None:
    assert (_C.isa()["chosen"] in ("amx", "avx512_bf16")) is module.BFLOAT16_PRODUCTS
    code = "from lowbit.ops import input_gradient; print(input_gradient.BFLOAT16_PRODUCTS)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"LOWBIT_ISA": "avx2"},
    )
    assert run.stdout.strip() == "False"
