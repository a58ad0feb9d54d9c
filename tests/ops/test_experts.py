# SPDX-License-Identifier: Apache-2.0
"""experts: every kernel row against float64, and where products are of integers bit for bit against each other and
against the products of gather_linear; its gradients against autograd's; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_calls import FORMATS, FORMS, OUT, ROUTES, E, Form, H, Of, case, expected, op, routed
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor
from torch.nn import functional

import lowbit
from lowbit import _C, testing
from lowbit.ops.experts import experts, gate_of
from lowbit.testing import assert_within

ROWS = testing.rows("experts")
experts_row = fixture_of(ROWS)


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_token_is_within_budget_of_the_float64_reference(
    experts_row: str, dtype: str, subtests: pytest.Subtests
) -> None:
    served = 0
    for number, of in enumerate(FORMATS):
        form = FORMS[number % len(FORMS)]
        for route in {list(ROUTES)[number % len(ROUTES)], "many tokens"}:
            x, index, weights = routed(route, dtype)
            index, weights = index.to((torch.int32, torch.int64)[number % 2]), weights.to((x.dtype, torch.float32)[number % 2])
            try:
                with lowbit.force_kernel(experts_row):
                    y = case(of, form.gated).run(x, index, weights, form)
            except NotImplementedError:
                continue
            served += 1
            with subtests.test(of=of, form=form, route=route):
                assert _C.last_kernel("experts") == experts_row and y.dtype == x.dtype
                wanted, allowed = expected(of, form, route, dtype, weights.dtype)
                assert_within(y, wanted, allowed, f"{experts_row} {of} {form} {route}")
    assert served or dtype != "bfloat16" and experts_row.endswith("_bf16")


@pytest.mark.core
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_is_within_budget_of_the_float64_reference(experts_row: str, form: Form) -> None:
    served = 0
    for of in (("int4", 32, "symmetric", "int8_group"), ("int8", 0, "asymmetric", "int8_row"), ("bfloat16", 0, "symmetric", "float"),
               ("int4", 32, "asymmetric", "float")):  # fmt: skip
        for route in ROUTES:
            try:
                with lowbit.force_kernel(experts_row):
                    y = case(of, form.gated).run(*routed(route, "bfloat16"), form)
            except NotImplementedError:
                continue
            served += 1
            assert_within(y, *expected(of, form, route, "bfloat16"), f"{experts_row} {of} {route}")
    assert served


def test_bits_depend_on_no_number_of_threads(experts_row: str) -> None:
    for of in (("int4", 32, "symmetric", "int8_group"), ("int4", 32, "symmetric", "float"), ("float32", 0, "symmetric", "float"), ("bfloat16", 0, "symmetric", "float")):  # fmt: skip
        mine, form = case(of, True), Form()
        x, index, weights = torch.randn(300, H), torch.randint(0, E + 1, (300, 3)), torch.rand(300, 3)
        for dtype in (torch.float32, torch.bfloat16):
            try:
                with forced(experts_row):
                    same_for_any_threads(lambda: mine.run(x.to(dtype), index, weights, form), (1, 2, 3, 4))  # noqa: B023
            except NotImplementedError:
                continue


@pytest.mark.parametrize("of", [of for of in FORMATS if of[3].startswith("int8")], ids=str)
def test_integer_products_have_one_result_on_every_instruction_set(of: Of) -> None:
    form = FORMS[FORMATS.index(of) % len(FORMS)]
    results: dict[str, Tensor] = {}
    for row in ROWS:
        if row["available"] and "_int8_" in row["name"]:
            with lowbit.force_kernel(str(row["name"])):
                try:
                    results[str(row["name"])] = case(of, form.gated).run(*routed("many tokens", "float32"), form)
                except NotImplementedError:
                    continue
    first, *others = results.values()
    assert others and all(other.equal(first) for other in others), list(results)


@pytest.mark.parametrize("of", [("int4", 32, "symmetric", "int8_group"), ("int8", 0, "asymmetric", "int8_row"), ("int8", 32, "symmetric", "int8_row_asymmetric")], ids=str)  # fmt: skip
def test_integer_products_are_those_of_gather_linear_added_in_the_order_of_experts(of: Of) -> None:
    """With router weights whose products are exact."""
    mine, form = case(of, False), Form("none", gated=False)
    x, index = torch.randn(90, H), torch.randint(0, E, (90, 3))
    weights = torch.tensor([0.5, -2.0, 0.25])[torch.randint(0, 3, (90, 3))]
    hidden = torch.ops.lowbit.gather_linear(x, mine.gate_up, index, *mine.args[0], mine.gate_up_bias)
    each = torch.ops.lowbit.gather_linear(hidden, mine.down, index, *mine.args[1], mine.down_bias) * weights[..., None]
    order = index.sort(dim=1, stable=True).indices
    wanted = torch.zeros(90, OUT)
    for j in range(3):
        wanted += each[torch.arange(90), order[:, j]]
    assert mine.run(x, index, weights, form).equal(wanted)


def test_pairs_of_no_expert_count_nothing() -> None:
    mine, form = case(("int4", 32, "symmetric", "int8_group"), True), Form()
    x, index, weights = torch.randn(20, H), torch.randint(0, E, (20, 3)), torch.rand(20, 3)
    nobody = torch.rand(20, 3) < 0.4
    marked = mine.run(x, index.masked_fill(nobody, E), weights.masked_fill(nobody, torch.nan), form)
    assert marked.equal(mine.run(x, index, weights.masked_fill(nobody, 0.0), form))
    assert mine.run(x, torch.full_like(index, E), weights, form).eq(0).all()
    assert mine.run(x, index[:, :0], weights[:, :0], form).eq(0).all()
    assert mine.run(x[:0], index[:0], weights[:0], form).shape == (0, OUT)


def test_more_tokens_than_a_block_and_more_pairs_than_a_pass() -> None:
    mine, form = case(("int8", 0, "symmetric", "int8_row"), True), Form()
    x, index, weights = torch.randn(4500, H), torch.randint(0, E + 1, (4500, 3)), torch.rand(4500, 3)
    whole = mine.run(x, index, weights, form)
    for begin in range(0, 4500, 900):
        part = slice(begin, begin + 900)
        assert whole[part].equal(mine.run(x[part], index[part], weights[part], form)), begin


def test_tokens_that_are_not_finite_are_alone(experts_row: str) -> None:
    for of in (("int8", 0, "symmetric", "int8_row"), ("int4", 32, "asymmetric", "float"), ("bfloat16", 0, "symmetric", "float")):
        mine, form = case(of, True), Form()
        x, index, weights = (tensor.clone() for tensor in routed("many tokens", "bfloat16"))
        try:
            with lowbit.force_kernel(experts_row):
                clean = mine.run(x, index, weights, form)
                x[3, 5], x[4, 0], weights[20, 1], weights[21, 0] = torch.inf, torch.nan, torch.nan, torch.inf
                y = mine.run(x, index, weights, form)
        except NotImplementedError:
            continue
        odd = torch.tensor([3, 4, 20, 21])
        assert not y[odd].isfinite().any(), of
        rest = torch.ones(len(x), dtype=torch.bool).index_fill_(0, odd, False)
        torch.testing.assert_close(y[rest].float(), clean[rest].float(), rtol=2**-6, atol=0.02)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_are_autograds(form: Form) -> None:
    of = ("int8", 32, "symmetric", "float")
    mine = case(of, form.gated)
    x, index, weights = routed("few tokens, expert 0 without any, pairs of no expert", "float32")
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weights, mine.gate_up_bias, mine.down_bias)]
    grad = torch.randn(len(x), OUT)
    y = experts(leaves[0], mine.gate_up, mine.down, index, leaves[1], *mine.args,
                gate_of(form.activation, gated=form.gated, interleaved=form.interleaved, alpha=form.alpha,
                        limit=form.limit or None, up_offset=form.up_offset),
                leaves[2], leaves[3])  # fmt: skip
    y.backward(grad)
    dense = [torch.stack([torch.ops.lowbit.dequantize(one, *args[:4], bool(args[4])) for one in packed]).double()
             for packed, args in zip((mine.gate_up, mine.down), mine.args, strict=True)]  # fmt: skip
    theirs = [tensor.detach().double().requires_grad_() for tensor in leaves]
    total: Any = 0
    for t, j in (index < E).nonzero().tolist():
        e = int(index[t, j])
        hidden = form.function(theirs[0][t] @ dense[0][e].T + theirs[2][e])
        row = theirs[1][t, j] * (hidden @ dense[1][e].T + theirs[3][e])
        total = total + (row * grad[t]).sum()
    total.backward()
    for mine_, other in zip(leaves, theirs, strict=True):
        torch.testing.assert_close(mine_.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


def test_a_gradient_for_one_of_the_arguments_alone() -> None:
    mine = case(("int8", 32, "symmetric", "int8_row"), True)
    x, index, weights = routed("many tokens", "bfloat16")
    for which in range(4):
        leaves = [x, weights, mine.gate_up_bias, mine.down_bias]
        leaves[which] = leaves[which].clone().requires_grad_()
        experts(leaves[0], mine.gate_up, mine.down, index, leaves[1], *mine.args, gate_of(), leaves[2], leaves[3]).sum().backward()  # fmt: skip
        assert leaves[which].grad.dtype == leaves[which].dtype and leaves[which].grad.isfinite().all()


def test_autocast_takes_its_dtype_and_forward_mode_is_refused() -> None:
    mine = case(("int8", 0, "symmetric", "float"), True)
    x, index, weights = routed("one token", "float32")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(x, mine.gate_up, mine.down, index, weights, *mine.args, gate_of())
    assert y.equal(experts(x.bfloat16(), mine.gate_up, mine.down, index, weights, *mine.args, gate_of()))
    with pytest.raises(NotImplementedError, match="experts"):
        torch.func.jvp(lambda x: experts(x, mine.gate_up, mine.down, index, weights, *mine.args, gate_of()), (x,), (x,))


def test_vmap_is_a_call_for_each_and_second_derivatives_are_refused_by_name() -> None:
    mine = case(("int8", 0, "symmetric", "float"), True)
    x, index, weights = routed("many tokens", "float32")

    def run(x: Tensor, index: Tensor = index, weights: Tensor = weights) -> Tensor:
        return experts(x, mine.gate_up, mine.down, index, weights, *mine.args, gate_of(), mine.gate_up_bias, mine.down_bias)

    xs, indices = torch.stack([x, 2 * x], 1), torch.stack([index, index.flip(0)])
    assert torch.equal(torch.vmap(run, (1, None))(xs, index), torch.stack([run(x), run(2 * x)]))
    xs.requires_grad_()
    shares = weights.clone().requires_grad_()
    y = torch.vmap(run, (1, 0, None))(xs, indices, shares)
    wanted = torch.stack([run(x, index, shares), run(2 * x, index.flip(0), shares)])
    assert torch.equal(y, wanted)
    of = shares, xs
    grads = torch.autograd.grad(y.square().sum(), of)
    leaf = xs.detach().requires_grad_()
    wanted = torch.stack([run(leaf[:, 0], index, shares), run(leaf[:, 1], index.flip(0), shares)])
    for got, expected_grad in zip(grads, torch.autograd.grad(wanted.square().sum(), (shares, leaf)), strict=True):
        torch.testing.assert_close(got, expected_grad)
    refused = "the backward of experts: no argument may require a gradient, which this op does not have"
    with pytest.raises(NotImplementedError, match=refused):
        torch.autograd.grad(run(x, index, shares).square().sum(), shares, create_graph=True)
    with pytest.raises(NotImplementedError, match=refused):
        torch.func.grad(lambda x: run(x).sum())(x)


def test_any_strides() -> None:
    mine, form = case(("int8", 0, "symmetric", "float"), True), Form()
    x, index, weights = torch.randn(H, 6).T, torch.randint(0, E, (2, 6)).T, torch.rand(2, 6).T
    assert mine.run(x, index, weights, form).equal(mine.run(x.contiguous(), index.contiguous(), weights.contiguous(), form))


def test_two_formats_in_one_call() -> None:
    first, second, form = case(("int4", 32, "symmetric", "int8_group"), True), case(("int8", 0, "symmetric", "int8_row"), True), Form()
    x, index, weights = routed("many tokens", "float32")
    y = op(x, first.gate_up, second.down, index, weights, first.args[0], second.args[1], *form.numbers)
    hidden = torch.ops.lowbit.gather_linear(x, first.gate_up, index, *first.args[0])
    each = torch.ops.lowbit.gather_linear(form.function(hidden), second.down, index, *second.args[1])
    torch.testing.assert_close(y, (each * weights[..., None]).sum(1), rtol=1e-2, atol=1e-2)
    floats = case(("int8", 0, "symmetric", "float"), True)
    with pytest.raises(NotImplementedError, match="activations of a product"):
        op(x, first.gate_up, floats.down, index, weights, first.args[0], floats.args[1], *form.numbers)


def test_a_layer_without_biases_is_one_call_under_compile() -> None:
    mine = case(("int4", 32, "symmetric", "int8_group"), True)
    x, index, weights = routed("many tokens", "float32")
    run = lambda x: experts(x, mine.gate_up, mine.down, index, weights, *mine.args, gate_of(limit=7.0, alpha=1.702, up_offset=1.0))  # noqa: E731
    assert torch.compile(run, fullgraph=True, backend="eager")(x).equal(run(x))
    with torch.no_grad():
        assert functional.relu(run(x)).equal(run(x).relu())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("wrong", [-1, E + 1, 2**31 - 1])
def test_an_index_that_names_no_expert_is_refused(dtype: torch.dtype, wrong: int) -> None:
    mine = case(("int8", 0, "symmetric", "float"), True)
    index = torch.zeros(4, 2, dtype=dtype)
    index[2, 1] = wrong
    with pytest.raises(ValueError, match=rf"experts: index must be 0 to 4, .* or 5 for no expert, got index\[2, 1\] = {wrong}"):
        mine.run(torch.randn(4, H), index, torch.rand(4, 2), Form())


NUMBERS = [32, 64, _C.FORMATS["int8"], 0, 0, 0]


@pytest.mark.parametrize("change, error, text", [
    ({"x": torch.randn(2, 64).double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"x": torch.randn(2, 60)}, ValueError, r"x must have shape \[T, k\] with k=64 of gate_up, got \[2, 60\]"),
    ({"index": torch.zeros(2, 3)}, TypeError, "index must be int32 or int64, got float32"),
    ({"index": torch.zeros(3, 3, dtype=torch.int32)}, ValueError, r"index must have shape \[T, k\], here T=2, got \[3, 3\]"),
    ({"weights": torch.rand(2, 2)}, ValueError, r"weights must have shape \[2, 3\], got \[2, 2\]"),
    ({"weights": torch.zeros(2, 3, dtype=torch.int32)}, TypeError, "weights must be float32, bfloat16 or float16, got int32"),
    ({"gate_up": torch.zeros(3, 2, 1152)}, TypeError, "gate_up must be packed uint8, got float32"),
    ({"gate_up": torch.zeros(2, 1152, dtype=torch.uint8)}, ValueError, r"gate_up must have shape \[E, panels"),
    ({"gate_up": torch.zeros(3, 1, 1152, dtype=torch.uint8)}, ValueError, r"gate_up must have shape \[3, 2, 1152\]"),
    ({"gate_up": torch.zeros(0, 2, 1152, dtype=torch.uint8)}, ValueError, r"gate_up must have shape \[E, panels"),
    ({"down": torch.zeros(2, 4, 1152, dtype=torch.uint8)}, ValueError, r"down must have shape \[3, 4, 1152\]"),
    ({"gate_up_bias": torch.randn(32)}, ValueError, r"gate_up_bias must have shape \[3, 32\], got \[32\]"),
    ({"down_bias": torch.zeros(3, 64, dtype=torch.int8)}, TypeError, "down_bias must be float32, bfloat16 or float16, got int8"),
    ({"gate_up_args": NUMBERS[:5]}, ValueError, r"gate_up_args must be \(n, k, format, .* got 5 numbers"),
    ({"gated": False}, ValueError, "n of gate_up must be the k of down, as there is no gate, got 32 and 16"),
    ({"down_args": [64, 32, *NUMBERS[2:]]}, ValueError, "n of gate_up must be twice the k of down, got 32 and 32"),
    ({"activation": 6}, ValueError, "activation must be 0..5, got activation=6"),
    ({"activation": 1, "alpha": 1.5}, ValueError, "alpha must be finite, and 1 for an activation other than silu, got 1.5"),
    ({"limit": -1.0}, ValueError, "limit must be positive, or 0 for none, got -1"),
    ({"up_offset": float("inf")}, ValueError, "up_offset must be finite, got inf"),
    ({"gated": False, "limit": 1.0}, ValueError, r"interleaved, limit and up_offset must be left out for experts without a gate \(gated=False\)"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {
        "x": torch.randn(2, 64),
        "gate_up": torch.zeros(3, 2, 1152, dtype=torch.uint8),
        "down": torch.zeros(3, 4, 1152, dtype=torch.uint8),
        "index": torch.zeros(2, 3, dtype=torch.int32),
        "weights": torch.rand(2, 3),
        "gate_up_args": NUMBERS,
        "down_args": [64, 16, *NUMBERS[2:]],
        **{"activation": 4, "gated": True, "interleaved": False, "alpha": 1.0, "limit": 0.0, "up_offset": 0.0},
        "gate_up_bias": None,
        "down_bias": None,
    }
    refused_alike(op, good | change, error, f"experts: {text}")


def test_names_and_limits_are_refused_by_the_function() -> None:
    mine = case(("int8", 0, "symmetric", "float"), True)
    arguments = *routed("one token", "float32"), *mine.args
    x, index, weights, *args = arguments
    with pytest.raises(ValueError, match="experts: activation must be one of none, relu, .* got 'tanh'"):
        experts(x, mine.gate_up, mine.down, index, weights, *args, gate_of("tanh"))
    with pytest.raises(ValueError, match="experts: limit must be positive, or None for none, got 0"):
        experts(x, mine.gate_up, mine.down, index, weights, *args, gate_of(limit=0))


def test_torchs_checks_of_the_registration() -> None:
    mine = case(("int8", 0, "symmetric", "float"), True)
    x, index, weights = torch.randn(H, 4).T, torch.randint(0, E + 1, (4, 2)), torch.rand(4, 2)
    torch.library.opcheck(op.default, (x, mine.gate_up, mine.down, index, weights, *mine.args, 4))
