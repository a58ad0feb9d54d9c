# SPDX-License-Identifier: Apache-2.0
"""gather_linear: every row against float64 and, where products are of integers, bit for bit against `linear`; its
gradients against those of one product for each row; what it refuses."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import ambient, forced
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.ops.gather_linear import gather_linear
from lowbit.testing import LinearCase, assert_within, make_data

op = torch.ops.lowbit.gather_linear
ROWS = testing.rows("gather_linear")
gather_row = fixture_of(ROWS)
E, N, K = 5, 37, 132
FORMATS = [of for of in testing.format_cases() if of[1] in (0, 16, 32, 64)] + [
    ("int8_semi_sparse", group_size, "symmetric", x_format)
    for group_size, x_format in itertools.product((0, 32), _C.FORMAT_FACTS["int8_semi_sparse"]["x_formats"])
]
ROUTES = {
    "one row": [[3]],
    "few rows, weight 0 without any": [[1, 4], [4, 1], [3, 4]],
    "one weight, named twice by each token": [[2, 2]] * 40,
    "many rows": [[t % 3 + 1, 4 if t % 5 else 1] for t in range(70)],
}


@functools.cache
def cases(name: str, of: tuple[str, int, str, str], dtype: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [T, k], the packed weights, the biases, and for each row of x and each weight the result and its budget."""
    format, group_size, mapping, x_format = of
    tokens = len(ROUTES[name])
    x = torch.randn(tokens, K, generator=torch.Generator().manual_seed(tokens)).to(getattr(torch, dtype))
    case = LinearCase(tokens, N, K, dtype, format, group_size, mapping, x_format, "float32")
    torch.manual_seed(tokens)
    data = [make_data(case, x, torch.randn(N, K)) for _ in range(E)]
    packed, biases = torch.stack([one.packed for one in data]), torch.stack([one.bias for one in data])
    return (
        x,
        packed,
        biases,
        torch.stack([one.wanted for one in data], 1),
        torch.stack([one.allowed for one in data], 1),
    )


def call_of(of: tuple[str, int, str, str]) -> tuple[int, int, int, int, bool, int]:
    format, group_size, mapping, x_format = of
    return LinearCase(1, N, K, "float32", format, group_size, mapping, x_format).op_args


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_row_is_within_budget_of_the_float64_reference(
    gather_row: str, dtype: str, subtests: pytest.Subtests
) -> None:
    served = 0
    for number, of in enumerate(FORMATS):
        name = list(ROUTES)[number % len(ROUTES)]
        for route in {name, "many rows"}:
            x, packed, biases, wanted, allowed = cases(route, of, dtype)
            index = torch.tensor(ROUTES[route], dtype=(torch.int32, torch.int64)[number % 2])
            rows = torch.arange(len(x))[:, None]
            try:
                with lowbit.force_kernel(gather_row):
                    y = op(x, packed, index, *call_of(of), biases)
            except NotImplementedError:
                continue
            served += 1
            with subtests.test(of=of, route=route):
                assert _C.last_kernel("gather_linear") == gather_row and y.dtype == x.dtype
                what = f"{gather_row} {of} {route}"
                assert_within(y, wanted[rows, index], allowed[rows, index], what)
                with forced(gather_row):
                    assert y.equal(op(x[:, None].expand(*index.shape, K), packed, index, *call_of(of), biases)), what
                with ambient("threads 1"), forced(gather_row):
                    assert y.equal(op(x, packed, index, *call_of(of), biases)), what
    assert served or dtype == "float32" and gather_row.endswith("_bf16")


@pytest.mark.parametrize("of", [of for of in FORMATS if of[3].startswith("int8")], ids=str)
def test_integer_products_have_the_bits_of_linear(of: tuple[str, int, str, str]) -> None:
    """However many rows a weight has, and whichever others there are."""
    for route in ROUTES:
        x, packed, biases, *_ = cases(route, of, "float32")
        index = torch.tensor(ROUTES[route])
        y = op(x, packed, index, *call_of(of), biases)
        for e in range(E):
            each = torch.ops.lowbit.linear(x, packed[e], *call_of(of), biases[e])
            t, j = (index == e).nonzero(as_tuple=True)
            assert y[t, j].equal(each[t]), (route, e)


@pytest.mark.parametrize("of", [("int4", 32, "symmetric", "float"), ("bfloat16", 0, "symmetric", "float"), ("fp8_e4m3", 0, "symmetric", "float8_row")], ids=str)  # fmt: skip
def test_other_rows_change_no_bit_of_a_float_product(of: tuple[str, int, str, str]) -> None:
    """Where a weight has the same rows, in the same order, whatever the values of other rows and weights."""
    x, packed, biases, *_ = cases("many rows", of, "float32")
    index = torch.tensor(ROUTES["many rows"])
    y, mine = op(x, packed, index, *call_of(of), biases), index == 4
    others = x.clone()
    others[~mine.any(1)] = torch.nan
    moved = torch.where(mine, index, (index + 1) % 4)
    assert op(others, packed, moved, *call_of(of), biases)[mine].equal(y[mine])


def test_rows_that_are_not_finite_and_extreme_ones(gather_row: str, subtests: pytest.Subtests) -> None:
    for of in (("int8", 0, "symmetric", "int8_row"), ("int4", 32, "asymmetric", "float"), ("float32", 0, "symmetric", "float"),
               ("int8_semi_sparse", 0, "symmetric", "float"), ("bfloat16", 0, "symmetric", "float")):  # fmt: skip
        x, packed, *_ = cases("many rows", of, "bfloat16")
        index, x = torch.tensor(ROUTES["many rows"]), x.clone()
        clean = op(x, packed, index, *call_of(of))
        x[3, 5], x[4, 0], x[20, 131] = torch.inf, torch.nan, -torch.inf
        x[30], x[31] = 1e35, 1e-35
        try:
            with lowbit.force_kernel(gather_row):
                y = op(x, packed, index, *call_of(of))
        except NotImplementedError:
            continue
        with subtests.test(of=of):
            assert not y[[3, 4, 20]].isfinite().any(-1).all()
            assert y[4].isnan().all()
            rest = torch.ones(len(x), dtype=torch.bool).index_fill_(0, torch.tensor([3, 4, 20, 30, 31]), False)
            assert y[rest].isfinite().all()
            torch.testing.assert_close(y[rest].float(), clean[rest].float(), rtol=2**-6, atol=0.05)
            wanted = torch.stack([torch.ops.lowbit.linear(x[30:32], one, *call_of(of)) for one in packed], 1)
            got = y[30:32].float()
            torch.testing.assert_close(got, wanted[[[0], [1]], index[30:32]].float(), rtol=2**-6, atol=1e-37)


def test_more_rows_than_a_pass_and_more_than_a_family_takes() -> None:
    of = ("int4", 32, "symmetric", "int8_group")
    packed = cases("one row", of, "float32")[1]
    for tokens, weights in ((1500, [0]), (1500, [0, 1, 2, 3, 4])):
        x = torch.randn(tokens, K)
        index = torch.tensor(weights)[torch.randint(0, len(weights), (tokens, 2))]
        y = op(x, packed, index, *call_of(of))
        each = torch.stack([torch.ops.lowbit.linear(x, one, *call_of(of)) for one in packed], 1)
        assert y.equal(each[torch.arange(tokens)[:, None], index])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("x_format", ["float", "int8_row"])
def test_gradients_are_those_of_one_product_for_each_row(shared: bool, x_format: str) -> None:
    of = ("int8", 32, "symmetric", x_format)
    x, packed, biases, *_ = cases("many rows", of, "float32")
    index = torch.tensor(ROUTES["many rows"])
    x = x.clone() if shared else torch.randn(*index.shape, K)
    x.requires_grad_()
    biases = biases.clone().requires_grad_()
    grad = torch.randn(*index.shape, N)
    gather_linear(x, packed, index, call_of(of), biases).backward(grad)
    n, k, format, group_size, asymmetric, _ = call_of(of)
    dense = torch.stack([torch.ops.lowbit.dequantize(one, n, k, format, group_size, asymmetric) for one in packed])
    of_rows = torch.einsum("tjn,tjnk->tjk", grad, dense[index])
    torch.testing.assert_close(x.grad, of_rows.sum(1) if shared else of_rows, rtol=1e-4, atol=1e-4)
    of_biases = torch.zeros(E, N).index_add_(0, index.flatten(), grad.flatten(0, 1))
    torch.testing.assert_close(biases.grad, of_biases, rtol=1e-5, atol=1e-5)
    frozen = gather_linear(x, packed, index, call_of(of), biases.detach())
    frozen.sum().backward()


def test_autocast_takes_its_dtype_and_forward_mode_is_refused() -> None:
    of = ("int8", 0, "symmetric", "float")
    x, packed, biases, *_ = cases("few rows, weight 0 without any", of, "float32")
    index = torch.tensor(ROUTES["few rows, weight 0 without any"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = gather_linear(x, packed, index, call_of(of), biases)
    assert y.equal(gather_linear(x.bfloat16(), packed, index, call_of(of), biases))
    with pytest.raises(NotImplementedError, match="gather_linear"):
        torch.func.jvp(lambda x: gather_linear(x, packed, index, call_of(of)), (x,), (x,))


def test_no_rows_and_any_strides() -> None:
    of = ("int8", 0, "symmetric", "float")
    packed = cases("one row", of, "float32")[1]
    for tokens, each in ((0, 3), (3, 0)):
        index = torch.zeros(tokens, each, dtype=torch.int64)
        assert op(torch.randn(tokens, K), packed, index, *call_of(of)).shape == (tokens, each, N)
    x, index = torch.randn(K, 6).T, torch.randint(0, E, (2, 6)).T
    assert op(x, packed, index, *call_of(of)).equal(op(x.contiguous(), packed, index.contiguous(), *call_of(of)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("wrong", [-1, E, 2**31 - 1])
def test_an_index_that_names_no_weight_is_refused(dtype: torch.dtype, wrong: int) -> None:
    of = ("int8", 0, "symmetric", "float")
    packed = cases("one row", of, "float32")[1]
    index = torch.zeros(4, 2, dtype=dtype)
    index[2, 1] = wrong
    with pytest.raises(ValueError, match=rf"gather_linear: index must be 0 to 4, .* got index\[2, 1\] = {wrong}"):
        op(torch.randn(4, K), packed, index, *call_of(of))


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(2, 64).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"x": torch.randn(2, 60)}, ValueError, r"x must have shape \[T, k\] or \[T, J, k\], here \[2, 64\] or \[2, 3, 64\], got"),
    ({"x": torch.randn(3, 64)}, ValueError, r"x must have shape \[T, k\]"),
    ({"x": torch.randn(2, 2, 64)}, ValueError, r"x must have shape \[T, k\]"),
    ({"index": torch.zeros(2, 3)}, TypeError, "index must be int32 or int64, got float32"),
    ({"index": torch.zeros(2, dtype=torch.int32)}, ValueError, r"index must have shape \[T, J\], got \[2\]"),
    ({"weight": torch.zeros(3, 1, 1152)}, TypeError, "weight must be packed uint8, got float32"),
    ({"weight": torch.zeros(1, 1152, dtype=torch.uint8)}, ValueError, r"weight must have shape \[E, panels"),
    ({"weight": torch.zeros(3, 2, 1152, dtype=torch.uint8)}, ValueError, r"weight must have shape \[3, 1, 1152\]"),
    ({"weight": torch.zeros(0, 1, 1152, dtype=torch.uint8)}, ValueError, r"weight must have shape \[E, panels"),
    ({"bias": torch.randn(16)}, ValueError, r"bias must have shape \[3, 16\], got \[16\]"),
    ({"bias": torch.zeros(3, 16, dtype=torch.int8)}, TypeError, "bias must be float32, bfloat16 or float16, got int8"),
    ({"x_format": 4}, ValueError, "linear: x_format must be"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {
        "x": torch.randn(2, 64),
        "weight": torch.zeros(3, 1, 1152, dtype=torch.uint8),
        "index": torch.zeros(2, 3, dtype=torch.int32),
        **{"n": 16, "k": 64, "format": _C.FORMATS["int8"], "group_size": 0, "asymmetric": False, "x_format": 0},
        "bias": None,
    }
    refused_alike(op, good | change, error, text if text.startswith("linear") else f"gather_linear: {text}")


def test_torchs_checks_of_the_registration() -> None:
    of = ("int8", 0, "symmetric", "float")
    packed = cases("one row", of, "float32")[1]
    torch.library.opcheck(op.default, (torch.randn(K, 4).T, packed, torch.randint(0, E, (4, 2)), *call_of(of)))
