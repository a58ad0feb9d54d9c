# SPDX-License-Identifier: Apache-2.0
"""Muon and Muon8bit beside torch.optim.Muon, whose Newton-Schulz steps are replaced by the float64 reference."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit import optim
from lowbit.optim import newton_schulz
from lowbit.reference import optim as reference

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = ((40, 72), (72, 40), (64, 64), (300, 520), (1, 9), (9, 1))
FLOAT: dict[str, Any] = {"ns_dtype": torch.float32}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's optimizer with steps in float64: its own are in bfloat16 always."""
    module = torch.optim._muon

    def orthogonalized(grad: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
        return reference.orthogonalized(grad, coefficients, steps, eps).to(grad.dtype)

    monkeypatch.setattr(module, "_zeropower_via_newtonschulz", orthogonalized)


def matrices(dtype: torch.dtype = torch.float32, seed: int = 1) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    return [nn.Parameter((torch.randn(shape, generator=random) / 8).to(dtype)) for shape in SHAPES]


def run(optimizers: dict[torch.optim.Optimizer, list[nn.Parameter]], steps: int, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        grads = [torch.randn(shape, generator=random) for shape in SHAPES]
        for optimizer, params in optimizers.items():
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.to(p.dtype)
            optimizer.step()


OPTIONS = [
    {},
    {"lr": 0.02, "weight_decay": 0.3},
    {"nesterov": False, "momentum": 0.8},
    {"momentum": 0.0, "weight_decay": 0.0},
    {"adjust_lr_fn": "original", "ns_steps": 3},
    {"adjust_lr_fn": "match_rms_adamw", "eps": 1e-3},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 12},
    {"lr": torch.tensor(0.01), "ns_steps": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_muon_is_torchs_within_float32(exact: None, options: dict[str, Any]) -> None:
    ours, theirs = matrices(), matrices()
    run({optim.Muon(ours, **FLOAT, **options): ours, torch.optim.Muon(theirs, **options): theirs}, 5)
    for p, q, start in zip(ours, theirs, matrices(), strict=True):
        assert (p - q).norm() <= 1e-4 * (q - start).norm() + 1e-7 * q.norm()


def test_muon_in_bfloat16_is_as_far_from_float64_as_torchs() -> None:
    for shape in ((64, 64), (96, 200)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        wanted = reference.orthogonalized(matrix, COEFFICIENTS, 5, 1e-7)
        ours = newton_schulz.orthogonalize(matrix, COEFFICIENTS, 5, 1e-7, torch.bfloat16)
        theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        assert ours.dtype == torch.bfloat16
        assert (ours - wanted).norm() <= 1.5 * (theirs - wanted).norm() <= 0.1 * wanted.norm()


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (256, 256), (257, 300), (120, 700), (600, 90)], ids=str)
@pytest.mark.parametrize("rank", [None, 3])
def test_orthogonalization_in_float32_is_the_references(shape: tuple[int, int], rank: int | None) -> None:
    """With few directions the other singular values are small, which steps on the square of the matrix must not lose."""
    random = torch.Generator().manual_seed(5)
    matrix = torch.randn(shape, generator=random)
    if rank is not None:
        matrix = torch.randn(shape[0], rank, generator=random) @ torch.randn(rank, shape[1], generator=random) + 1e-3 * matrix
    for steps in (1, 2, 5, 6, 20):
        wanted = reference.orthogonalized(matrix, COEFFICIENTS, steps, 1e-7)
        ours = newton_schulz.orthogonalize(matrix, COEFFICIENTS, steps, 1e-7, torch.float32)
        assert (ours - wanted).norm() <= 3e-3 * wanted.norm(), steps
        if rank is None:
            assert (ours - wanted).norm() <= 1e-4 * wanted.norm(), steps


def test_zeros_and_nan() -> None:
    zeros = newton_schulz.orthogonalize(torch.zeros(8, 40), COEFFICIENTS, 5, 1e-7, torch.float32)
    assert (zeros == 0).all()
    p = nn.Parameter(torch.ones(8, 40))
    p.grad = torch.ones(8, 40)
    p.grad[2, 3] = float("nan")
    optim.Muon([p]).step()
    assert p.isnan().all()  # as with torch: the norm is nan


def test_muon8bit_drifts_by_its_rounding(exact: None) -> None:
    ours, theirs = matrices(), matrices()
    run({optim.Muon8bit(ours, min_8bit_size=0, **FLOAT): ours, torch.optim.Muon(theirs): theirs}, 10)
    for p, q, start in zip(ours, theirs, matrices(), strict=True):
        assert (p - q).norm() <= 0.05 * (q - start).norm()


@pytest.mark.parametrize("make", [optim.Muon, optim.Muon8bit])
def test_a_stack_of_experts_is_its_matrices(make: Any) -> None:
    stack = nn.Parameter(torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(1)))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    one, other = make([stack], lr=0.02), make(alone, lr=0.02)
    for seed in range(3):
        stack.grad = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(seed))
        for p, grad in zip(alone, stack.grad, strict=True):
            p.grad = grad.clone()
        one.step()
        other.step()
    assert torch.equal(stack, torch.stack([*alone]))


def test_any_memory_order_and_gaps() -> None:
    made = matrices()
    turned = [nn.Parameter(p.detach().clone().t().contiguous().t()) for p in made]
    apart = [nn.Parameter(torch.zeros(p.shape[0], 2 * p.shape[1])[:, ::2].copy_(p.detach())) for p in made]
    run({optim.Muon(each, **FLOAT): each for each in (made, turned, apart)}, 3)
    for p, q, r in zip(made, turned, apart, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(r, p, rtol=1e-5, atol=1e-7)


def test_bfloat16_parameters_with_a_master_follow_float32_ones() -> None:
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, **FLOAT}
    start = matrices(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in start]
    whole, plain = copy.deepcopy(start), copy.deepcopy(start)
    master = optim.Muon(whole, master="bf16+8", **options)
    run({master: whole, optim.Muon(plain, **options): plain, optim.Muon(wide, **options): wide}, 20)
    for p, q, r, old in zip(whole, plain, wide, start, strict=True):
        way = (r - old.float()).norm()
        assert (master.float32_values(p) - r).norm() <= 0.02 * way + 2.0**-14 * r.norm()
        assert (q.float() - r).norm() > 3 * (master.float32_values(p) - r).norm()


def test_torchs_state_is_loaded_and_continues(exact: None) -> None:
    theirs = matrices()
    twin = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    run({twin: theirs}, 3)
    ours = copy.deepcopy(theirs)
    optimizer = optim.Muon(ours, **FLOAT)
    optimizer.load_state_dict(copy.deepcopy(twin.state_dict()))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["adjust_lr_fn"]) == (0.02, 0.9, "match_rms_adamw")
    run({twin: theirs, optimizer: ours}, 2, seed=9)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [optim.Muon, optim.Muon8bit])
def test_a_saved_state_continues_bit_for_bit(make: Any) -> None:
    params = matrices()
    optimizer = make(params, lr=0.02, adjust_lr_fn="original", **FLOAT)
    run({optimizer: params}, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = copy.deepcopy(params)
    again = make(others, lr=0.5)
    again.load_state_dict(torch.load(file, weights_only=True))
    run({optimizer: params, again: others}, 2, seed=4)
    assert all(torch.equal(*both) for both in zip(params, others, strict=True))


def test_grad_scaler_unscales_and_skips() -> None:
    plain, scaled = matrices(), matrices()
    one, other = optim.Muon(plain, **FLOAT), optim.Muon(scaled, **FLOAT)
    run({one: plain}, 1)
    random = torch.Generator().manual_seed(0)
    for p in scaled:
        p.grad = torch.randn(p.shape, generator=random) * 1024
    other.grad_scale, other.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    other.step()
    assert all(torch.equal(*both) for both in zip(plain, scaled, strict=True))
    other.found_inf = torch.tensor(1.0)
    other.step()
    assert all(torch.equal(*both) for both in zip(plain, scaled, strict=True))
    assert all(float(other.state[p]["step"]) == 1 for p in scaled)


def test_stochastic_rounding_differs_between_matrices() -> None:
    params = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = optim.Muon(params, lr=1e-2, bf16_stochastic_round=True)
    for p in params:
        p.grad = torch.eye(64, dtype=torch.bfloat16) + 1
    optimizer.step()
    assert not torch.equal(*params)


def test_under_compile_a_step_is_the_same() -> None:
    torch._dynamo.reset()  # steps of other optimizers in this process made sizes symbols
    eager, compiled = matrices(), matrices()
    one, other = optim.Muon8bit(eager, **FLOAT), optim.Muon8bit(compiled, **FLOAT)
    step = torch.compile(other.step)
    random = torch.Generator().manual_seed(0)
    for p, q in zip(eager, compiled, strict=True):
        p.grad = torch.randn(p.shape, generator=random)
        q.grad = p.grad.clone()
    one.step()
    step()
    for p, q in zip(eager, compiled, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


REFUSED = [
    ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
    ({"lr": torch.zeros(2)}, "Tensor lr must be 1-element"),
    ({"momentum": -0.1}, "momentum should be >= 0 but is: -0.1"),
    ({"weight_decay": -0.1}, "weight decay should be >= 0 but is: -0.1"),
    ({"adjust_lr_fn": "mine"}, "Adjust learning rate function mine is not supported"),
]
OURS = [
    ({"ns_steps": 100}, "Number of steps must be less than 100 for computational efficiency"),
    ({"ns_steps": 2.5}, "Invalid ns_steps value: 2.5"),
    ({"ns_coefficients": (1.0, 2.0)}, "Coefficients must be a tuple of exactly 3 values"),
    ({"ns_coefficients": (1.0, 2.0, "x")}, "Invalid ns_coefficients value at index 2: x"),
    ({"ns_dtype": torch.float16}, "Invalid ns_dtype value: torch.float16, must be torch.float32 or torch.bfloat16"),
    ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
    ({"nesterov": "yes"}, "Invalid nesterov value: 'yes'"),
]


@pytest.mark.parametrize("options, message", REFUSED + OURS, ids=str)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.Muon(matrices(), **options)
    if any(message == words for _, words in REFUSED):
        with pytest.raises(ValueError, match=message):
            torch.optim.Muon(matrices(), **options)


def test_other_parameters_are_refused_with_torchs_words_and_a_hint() -> None:
    for shape in ((8,), (), (2, 3, 4, 5)):
        words = "only supports 2D parameters.* a parameter with size"
        with pytest.raises(ValueError, match=f"Muon8bit {words}.*such as AdamW8bit"):
            optim.Muon8bit([*matrices(), nn.Parameter(torch.ones(shape))])
        with pytest.raises(ValueError, match=f"Muon {words}"):
            torch.optim.Muon([nn.Parameter(torch.ones(shape))])
    optimizer = optim.Muon(matrices())
    with pytest.raises(ValueError, match="such as AdamW8bit"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1


def test_a_bad_gradient_is_refused_before_a_matrix_changes() -> None:
    params = matrices()
    optimizer = optim.Muon(params)
    for p in params:
        p.grad = torch.ones_like(p)
    params[-1].grad = torch.ones(9, 1).to_sparse()
    before = copy.deepcopy(params)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    optimizer.param_groups[0]["ns_steps"] = 100
    params[-1].grad = torch.ones(9, 1)
    with pytest.raises(ValueError, match="Number of steps must be less than 100"):
        optimizer.step()
    assert all(torch.equal(*both) for both in zip(params, before, strict=True))
