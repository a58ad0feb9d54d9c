# SPDX-License-Identifier: Apache-2.0
"""Optimizers: against torch's own in float64, against a fresh one that loads the same state, and state dicts that must be refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from tests.settings import ambient
from torch import Tensor, nn

from lowbit import optim
from lowbit.reference import optim as reference

from .compare import UNIT, Wrong, taken_by, within

DRIFT = 2e-5
"""How far a step from the same moments may be from torch's, relative to the largest step that torch's takes: float32 arithmetic."""
_MUON_DRIFT = 1e-3
"""The same of Muon: each step multiplies the error of small singular values by 3.4."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOMENT_DRIFT = 2e-6
"""The same of a moment before its format rounds it, relative to the largest moment before and after: an FMA, and the code's decoding."""


class _Lion(torch.optim.Optimizer):
    """Lion by the reference, as torch has none."""

    def __init__(self, params: list[Tensor], **options: Any) -> None:
        super().__init__(params, {"betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False} | options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            hyper = {"beta1": beta1, "beta2": beta2, "lr": float(group["lr"]), "weight_decay": group["weight_decay"]}
            for param in group["params"]:
                state = self.state[param]
                moment = state.setdefault("exp_avg", torch.zeros_like(param))
                gradient = -param.grad if group["maximize"] else param.grad
                new, (after,) = reference.lion(param, gradient, [moment], 0, hyper)
                terms = beta1 * moment, (1 - beta1) * gradient
                unknown = (terms[0] + terms[1]).abs() <= 2.0**-22 * (terms[0].abs() + terms[1].abs())
                state["jump"] = torch.where(unknown, 2 * hyper["lr"], 0.0)  # either sign is right
                param.copy_(new)
                moment.copy_(after)


class _Muon(torch.optim.Optimizer):
    """torch's Muon with Newton-Schulz steps in float64: its own are in bfloat16."""

    def __init__(self, params: list[Tensor], **options: Any) -> None:
        super().__init__(params, {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "maximize": False} | options)
        if any(param.ndim not in (2, 3) for param in params):
            raise ValueError("no matrix")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for param in group["params"]:
                moment = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                gradient = -param.grad if group["maximize"] else param.grad
                moment.lerp_(gradient, 1 - momentum)
                direction = gradient.lerp(moment, momentum) if group["nesterov"] else moment
                param.mul_(1 - lr * group["weight_decay"])
                for p, matrix in zip(param.view(-1, *param.shape[-2:]), direction.view(-1, *param.shape[-2:]), strict=True):
                    if p.numel():
                        ratio = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                        p.sub_(reference.orthogonalized(matrix, _COEFFICIENTS, group["ns_steps"], 1e-7), alpha=lr * ratio)


def _twin(name: str, params: list[Tensor], options: dict[str, Any]) -> torch.optim.Optimizer:
    known = ("lr", "weight_decay", "betas", "eps", "amsgrad", "maximize", "momentum", "nesterov", "ns_steps")
    kept = {key: value for key, value in options.items() if key in known}
    if name.startswith("AdamW"):
        return torch.optim.AdamW(params, **{"lr": 1e-3, "weight_decay": 1e-2} | kept)
    if name.startswith("Adam"):
        return torch.optim.Adam(params, **{"lr": 1e-3} | kept)
    if name.startswith("SGD"):
        return torch.optim.SGD(params, **{"lr": 1e-3, "momentum": 0.9} | kept)
    if name.startswith("Muon"):
        return _Muon(params, **{"lr": 1e-3, "weight_decay": 0.1} | kept)
    return _Lion(params, **{"lr": 1e-4} | kept)


def trains(name: str, params: list[Tensor], steps: int = 3, under: str = "", **options: Any) -> None:
    """A few steps from the same gradients and moments as torch's optimizer, on float64 copies; wherever torch's takes these parameters."""
    leaves = [nn.Parameter(param.detach()) for param in params]  # keeps strides

    def torch_takes() -> None:
        copies = [nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]
        twin = _twin(name, copies, options)
        for param in copies:
            param.grad = torch.zeros_like(param)
        twin.step()

    if not taken_by(torch_takes):
        return
    exact = [nn.Parameter(param.detach().double().clone()) for param in params]
    with ambient(under):
        ours = getattr(optim, name)(leaves, **options)
    twin = _twin(name, exact, options)
    for _ in range(steps):
        before = [param.detach().clone() for param in exact]
        for mine, wide in zip(leaves, exact, strict=True):
            grad = torch.randn(mine.shape, dtype=torch.float32).to(mine.dtype)
            mine.grad, wide.grad = grad.clone(), grad.double()
        with ambient(under):
            ours.step()
        old_moments = [_moments_of(twin, wide) for wide in exact]
        twin.step()
        decoded = _decoded(ours, name, leaves, options)
        for index, (mine, wide, old) in enumerate(zip(leaves, exact, before, strict=True)):
            what = f"parameter {index} of {list(mine.shape)}"
            way = float((wide.detach() - old).abs().amax()) if wide.numel() else 0.0
            unit = 2.0**-15 if "correction" in ours.state[mine] else UNIT[mine.dtype]
            allowed = (_MUON_DRIFT if name.startswith("Muon") else DRIFT) * way + 1.5 * unit * wide.detach().abs() + torch.finfo(mine.dtype).tiny
            within(ours.float32_values(mine), wide.detach(), allowed + twin.state[wide].get("jump", 0.0), what)
            for moment, wanted in _moments_of(twin, wide).items():
                size = float(wanted.abs().amax() + old_moments[index].get(moment, wanted).abs().amax()) if wanted.numel() else 0.0
                rounding = _rounding(wanted, ours.state[mine], ours.param_groups[0], moment, mine)
                within(decoded[index][moment], wanted, rounding + _MOMENT_DRIFT * size, f"{moment} of {what}")
                twin.state[wide][moment].copy_(decoded[index][moment])
            with torch.no_grad():
                wide.copy_(ours.float32_values(mine))  # errors do not add up, and a moment that a format rounds to 0 is 0 for both
    _round_trip(ours, name, leaves, options)


def _moments_of(twin: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    kept = twin.state[param].items()
    return {name: value.clone() for name, value in kept if isinstance(value, Tensor) and name not in ("step", "jump")}


def _decoded(
    ours: torch.optim.Optimizer, name: str, leaves: list[nn.Parameter], options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """The values of its moments, float32, for each parameter: as an optimizer with float32 moments loads them."""
    copies = _clone(leaves)
    again = getattr(optim, name)(copies, **(options | {"optim_bits": 32}))
    again.load_state_dict(ours.state_dict())
    return [again.state[param] for param in copies]


def _rounding(values: Tensor, state: dict[str, Any], group: dict[str, Any], moment: str, param: Tensor) -> Tensor:
    """How far the nearest value of its format is from each element of a moment."""
    values, state_format, block_size = values.detach(), group["state_format"], group["block_size"]
    if f"{moment}_scale" not in state:
        return values.abs() * UNIT[state[moment].dtype]
    dense = torch.empty_like(param, dtype=torch.float64, requires_grad=False).copy_(values)  # in the memory order of the parameter
    flat = dense.as_strided((dense.numel(),), (1,))
    scale, signed = reference.scales(flat, state_format, block_size), moment in ("exp_avg", "momentum_buffer")
    spread = scale.repeat_interleave(block_size)[: flat.numel()]
    codes = reference.nearest_code((flat / spread).nan_to_num(0.0), state_format, signed)
    flat.sub_(reference.decode(codes, scale, state_format, signed, block_size)).abs_()
    return dense


def _round_trip(ours: torch.optim.Optimizer, name: str, leaves: list[nn.Parameter], options: dict[str, Any]) -> None:
    again = getattr(optim, name)([nn.Parameter(param.detach().clone()) for param in leaves], **options)
    again.load_state_dict(pickle.loads(pickle.dumps(ours.state_dict())))
    _equal(ours.state_dict(), again.state_dict(), "a state dict after a round trip")


def _clone(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]


def _give_gradients(*lists: list[nn.Parameter]) -> None:
    for together in zip(*lists, strict=True):
        grad = torch.randn(together[0].shape, dtype=torch.float32)
        for param in together:
            param.grad = grad.to(param.dtype)


def _after_two_steps(
    name: str, params: list[Tensor], options: dict[str, Any]
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    leaves = [nn.Parameter(param.detach()) for param in params]
    ours = getattr(optim, name)(leaves, **options)
    for _ in range(2):
        _give_gradients(leaves)
        ours.step()
    return leaves, ours


def same_as_fresh(name: str, params: list[Tensor], change: Callable[..., Any], what: str, **options: Any) -> None:
    """After two steps and a change to state or parameters, a third step is that of a new optimizer that loads this state dict."""
    leaves, ours = _after_two_steps(name, params, options)
    ours = change(ours, leaves) or ours
    leaves = [param for group in ours.param_groups for param in group["params"]]
    fresh_leaves = _clone(leaves)
    fresh = getattr(optim, name)(fresh_leaves, **options)
    saved = copy.deepcopy(ours.state_dict())
    fresh.load_state_dict(copy.deepcopy(saved))
    _give_gradients(leaves, fresh_leaves)
    ours.step()
    fresh.step()
    for mine, wanted in zip(leaves, fresh_leaves, strict=True):
        if not torch.equal(mine, wanted):
            raise Wrong(f"{what}: the step is not that of a new optimizer with this state")
    _equal(ours.state_dict(), fresh.state_dict(), f"{what}: the state after the step")


def refuses_state(
    name: str, params: list[Tensor], change: Callable[[dict[str, Any]], Any], what: str, **options: Any
) -> None:
    """load_state_dict refuses a state dict with this change, and is then as it was: state, options, and the next step."""
    leaves, ours = _after_two_steps(name, params, options)
    before = copy.deepcopy(ours.state_dict())
    broken = copy.deepcopy(ours.state_dict())
    if change(broken) is False:
        return  # nothing there to change
    try:
        ours.load_state_dict(broken)
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError):
        _equal(before, ours.state_dict(), f"{what}: refused, but")
        _give_gradients(leaves)
        ours.step()
        return
    raise Wrong(f"load_state_dict accepted {what}")


def dynamic_map() -> Tensor:
    """The map of signed 8-bit codes, as a checkpoint of bitsandbytes has it."""
    return reference.code_map("dynamic8", True).float()


def loads(name: str, params: list[Tensor], state_dict: dict[str, Any], what: str, **options: Any) -> None:
    """A state dict of another library is taken, and a step works."""
    leaves = [nn.Parameter(param.detach()) for param in params]
    ours = getattr(optim, name)(leaves, **options)
    ours.load_state_dict(state_dict)
    _give_gradients(leaves)
    ours.step()
    if not all(param.isfinite().all() for param in leaves):
        raise Wrong(f"{what}: parameters are not finite after a step")


def _equal(a: Any, b: Any, what: str) -> None:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        same = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        if not same or not torch.equal(torch.nan_to_num(a.double()), torch.nan_to_num(b.double())):
            raise Wrong(f"{what} differs in a tensor")
    elif isinstance(a, dict) and isinstance(b, dict):
        if (a.keys() ^ b.keys()) - {"differentiable"}:  # torch's loader adds it to the groups
            raise Wrong(f"{what} differs in its keys: {sorted(map(str, a.keys() ^ b.keys()))}")
        for key in a.keys() & b.keys():
            _equal(a[key], b[key], f"{what} [{key}]")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for one, other in zip(a, b, strict=True):
            _equal(one, other, what)
    elif a != b:
        raise Wrong(f"{what}: {a!r} is not {b!r}")
