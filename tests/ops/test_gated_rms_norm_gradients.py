# SPDX-License-Identifier: Apache-2.0
"""Gradients of gated_rms_norm: every row against autograd through the formula in float64; what has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import testing

op = torch.ops.lowbit.gated_rms_norm_backward
backward_row = fixture_of(testing.rows("gated_rms_norm_backward"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
U = testing.ROUNDOFF["float32"]
EPS = 1e-6
ACTIVATION = 10
"""Roundings of silu and sigmoid, relative to their values, and of their derivatives, absolute."""
SLOPE = 1.1
"""A bound on these derivatives."""
Tensors = tuple[Tensor, ...]


def gate_of(gate: Tensor, options: dict[str, Any]) -> Tensor:
    return torch.sigmoid(gate) if options["activation"] == "sigmoid" else torch.nn.functional.silu(gate)


def formula(x: Tensor, gate: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    factor = gate_of(gate, options)
    groups = (x * factor if options["gate_first"] else x).unflatten(-1, (-1, options["group_size"]))
    y = (groups * (groups.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(-2) * weight
    return y if options["gate_first"] else y * factor


def gradients(function: Any, tensors: Tensors, grad_y: Tensor) -> Tensors:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(*leaves)
    return torch.autograd.grad(y, leaves, grad_y.to(y.dtype))


def roundings(x: Tensor, gate: Tensor, weight: Tensor, grad_y: Tensor, options: dict[str, Any]) -> Tensors:
    """Of the gradients of x, gate and weight, in float64.

    What is normalized has those of a sum of squares under a root, and of the gate if that comes first. u and its
    product with the normalized values, which the mean has, may cancel.
    """
    x, gate, weight, grad_y = (tensor.double() for tensor in (x, gate, weight, grad_y))
    size, first, factor = options["group_size"], options["gate_first"], gate_of(gate, options).abs()
    values = (x * factor if first else x).unflatten(-1, (-1, size))
    scale = (values.square().mean(-1, keepdim=True) + EPS).rsqrt()
    n = (values * scale).flatten(-2).abs()
    u = (grad_y * weight).abs() * (1 if first else factor)
    means = (u * n).unflatten(-1, (-1, size)).mean(-1, keepdim=True)
    terms = (scale * (u.unflatten(-1, (-1, size)) + n.unflatten(-1, (-1, size)) * means)).flatten(-2)
    of_n = (size + 8) / 2 + 4 + (2 * ACTIVATION + 2 if first else 0)
    of_terms = (2 * of_n + ACTIVATION + size + 8) * terms
    of_x = of_terms * (factor if first else 1) + ((ACTIVATION + 1) * terms * factor if first else 0)
    if first:
        of_gate = (of_terms * SLOPE + (ACTIVATION + 3) * terms) * x.abs()
    else:
        of_gate = (of_n + 4 + ACTIVATION) * SLOPE * (grad_y * weight).abs() * n
    written = grad_y.abs() * n * (1 if first else factor)
    return of_x, of_gate, (of_n + ACTIVATION + 3 + x.shape[0]) * written.sum(0)


def assert_row_has_gradients(row: str, tensors: Tensors, grad_y: Tensor, options: dict[str, Any]) -> None:
    """Within the roundings of float32, and of each to its dtype."""
    with forced(row):
        found = gradients(lambda *leaves: lowbit.gated_rms_norm(*leaves, EPS, **options), tensors, grad_y)
    wanted = gradients(lambda *wide: formula(*wide, options), tuple(each.double() for each in tensors), grad_y.double())
    for name, ours, exact, number, tensor in zip(
        ("x", "gate", "weight"), found, wanted, roundings(*tensors, grad_y, options), tensors, strict=True
    ):
        assert ours.dtype == tensor.dtype and ours.shape == tensor.shape
        roundoff, error = testing.ROUNDOFF[str(ours.dtype).removeprefix("torch.")], U * number
        rounding = roundoff * (exact.abs() + error + torch.finfo(ours.dtype).smallest_normal)
        testing.assert_within(ours, exact, error + rounding + 1e-30, what=f"{row}: gradient of {name}")


@pytest.mark.core
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_every_row_has_the_gradients_of_the_formula(
    backward_row: str, gate_first: bool, activation: str, subtests: pytest.Subtests
) -> None:
    """The last is large enough for several threads, and for tasks with different numbers of rows."""
    torch.manual_seed(0)
    sizes = [(1, 1, 1), (3, 15, 5), (1, 16, 16), (2, 34, 17), (5, 257, 257), (70, 1024, 256), (901, 384, 128)]
    for number, (m, n, group_size) in enumerate(sizes):
        x = (torch.randn(m, n) * torch.logspace(-2, 1, m)[:, None]).to(DTYPES[number % 3])
        x[0] *= m == 1  # a row of zeros
        for turn in range(3):
            gate, weight = torch.randn(m, n).to(DTYPES[turn]), torch.randn(n).to(DTYPES[(number + turn) % 3])
            grad_y = (torch.randn(m, n) / 64).to(x.dtype)  # of large tensors float16 has no gradients of size 1
            options = {"group_size": group_size, "activation": activation, "gate_first": gate_first}
            with subtests.test(m=m, n=n, turn=turn):
                assert_row_has_gradients(backward_row, (x, gate, weight), grad_y, options)


def test_large_gates(backward_row: str) -> None:
    x, weight, grad_y = torch.randn(4, 32), torch.randn(32), torch.randn(4, 32)
    gate = torch.tensor([-80.0, -20.0, 60.0, 1e4])[:, None].expand(4, 32)
    for gate_first in (False, True):
        options = {"group_size": 16, "activation": "silu", "gate_first": gate_first}
        assert_row_has_gradients(backward_row, (x, gate, weight), grad_y, options)


@pytest.mark.parametrize("gate_first", [False, True])
def test_the_bits_depend_neither_on_threads_nor_on_strides(gate_first: bool) -> None:
    x, gate, grad_y = torch.randn(3, 700, 4, 128)
    weight = torch.randn(128)

    def found(x: Tensor = x, gate: Tensor = gate, grad_y: Tensor = grad_y) -> list[Tensor]:
        call = lambda *leaves: lowbit.gated_rms_norm(*leaves, group_size=64, gate_first=gate_first)  # noqa: E731
        return list(gradients(call, (x, gate, weight), grad_y))

    same_for_any_threads(found)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    strided = found(turned, torch.cat([gate] * 2, -1)[..., :128], grad_y.mT.contiguous().mT)
    assert all(one.equal(other) for one, other in zip(found(), strided, strict=True))


@pytest.mark.parametrize("gate_first", [False, True])
def test_what_is_not_finite_stays_in_its_group(gate_first: bool) -> None:
    x, gate, grad_y = torch.randn(3, 2, 80)
    x[0, 3], gate[1, 50] = torch.nan, torch.nan
    call = lambda *leaves: lowbit.gated_rms_norm(*leaves, group_size=40, gate_first=gate_first)  # noqa: E731
    of_x, of_gate, of_weight = gradients(call, (x, gate, torch.ones(80)), grad_y)
    assert of_x[0, :40].isnan().all() and of_x[0, 40:].isfinite().all() and of_x[1, :40].isfinite().all()
    assert of_gate[1, 50].isnan() and of_gate[0, 40:].isfinite().all() and of_gate[1, :40].isfinite().all()
    assert of_weight[:40].isnan().all() and of_weight[40:].isnan().any()


def test_gradients_go_where_they_are_wanted() -> None:
    tensors, grad_y = (torch.randn(20, 24), torch.randn(20, 24), torch.randn(24)), torch.randn(20, 24)
    whole = gradients(lowbit.gated_rms_norm, tensors, grad_y)
    for i in range(3):
        leaf = tensors[i].clone().requires_grad_()
        y = lowbit.gated_rms_norm(*tensors[:i], leaf, *tensors[i + 1 :])
        assert torch.autograd.grad(y, leaf, grad_y)[0].equal(whole[i])
    with torch.no_grad():
        assert not lowbit.gated_rms_norm(*tensors[:2], leaf).requires_grad
    empty = gradients(lowbit.gated_rms_norm, (tensors[0][:0], tensors[1][:0], tensors[2]), grad_y[:0])
    assert empty[0].shape == (0, 24) and not empty[2].any()


def test_other_derivatives_are_refused_by_name() -> None:
    x, gate, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    leaf = x.clone().requires_grad_()
    y = lowbit.gated_rms_norm(leaf, gate, weight)
    with pytest.raises(NotImplementedError, match="the backward of gated_rms_norm: no argument may require a gradient"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="gated_rms_norm: no forward-mode derivative"):
        torch.func.jvp(lambda x: lowbit.gated_rms_norm(x, gate, weight), (x,), (x,))
    for batch in (x, leaf):
        with pytest.raises(NotImplementedError, match="gated_rms_norm: vmap is not supported"):
            torch.vmap(lambda x: lowbit.gated_rms_norm(x, gate[0], weight))(batch)


def test_under_torch_compile() -> None:
    tensors, grad_y = (torch.randn(30, 24), torch.randn(30, 24), torch.randn(24)), torch.randn(30, 24)
    compiled = torch.compile(lowbit.gated_rms_norm, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        gradients(compiled, tensors, grad_y), gradients(lowbit.gated_rms_norm, tensors, grad_y), strict=True
    ):
        assert one.equal(other)


@pytest.mark.parametrize("model, options", [
    ("qwen3_next.Qwen3NextRMSNormGated", {}),
    ("mamba2.MambaRMSNormGated", {"group_size": 16}),
])  # fmt: skip
def test_fused_modules_of_transformers_train_through_it(model: str, options: dict[str, int]) -> None:
    pytest.importorskip("transformers")
    from lowbit.quant.fused_gated_norm import FusedGatedNorm, gated_norm_facts

    folder, name = model.split(".")
    theirs = getattr(__import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[name]), name)(
        64, **options
    )
    x, gate, grad_y = torch.randn(3, 9, 64)

    def found() -> Tensors:
        leaves = (x.clone().requires_grad_(), gate.clone().requires_grad_(), theirs.weight)
        y = theirs(*leaves[:2])
        return y.detach(), y.grad_fn, *torch.autograd.grad(y, leaves, grad_y)

    wanted = found()
    facts = gated_norm_facts(theirs)
    assert facts is not None
    FusedGatedNorm.take(theirs, facts)
    ours = found()
    assert "GatedRmsNorm" in ours[1].name()
    for one, other in zip(ours[2:], wanted[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


ONES = torch.ones(2, 4)
GOOD = {"x": ONES, "gate": ONES, "weight": ONES[0], "grad_y": ONES, "eps": EPS, "group_size": 4}


@pytest.mark.parametrize("change, error, text", [
    ({"x": ONES.double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"grad_y": ONES.half()}, TypeError, "grad_y must be float32, got float16"),
    ({"grad_y": ONES[:1]}, ValueError, r"grad_y must have shape \[2, 4\], got \[1, 4\]"),
    ({"group_size": 3}, ValueError, "group_size must divide the 4 channels of x, got 3"),
    ({"grad_y": ONES.clone().requires_grad_()}, NotImplementedError, "no argument may require a gradient"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"gated_rms_norm_backward: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x = torch.randn(3, 20, 5).mT.to(dtype)
    torch.library.opcheck(op.default, (x, x * 2, torch.randn(20), x + 1, EPS, 10, False, True))
    leaves = (x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn(20, requires_grad=True))
    torch.library.opcheck(torch.ops.lowbit.gated_rms_norm.default, (*leaves, EPS, 10, False, True))
