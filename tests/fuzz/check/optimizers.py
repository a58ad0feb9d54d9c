# SPDX-License-Identifier: Apache-2.0
"""Optimizers: against torch's own in float64, against a fresh one that loads the same state, and state dicts that must be refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import optim
from lowbit.reference.optim import code_map

from .compare import UNIT, Wrong, ambient, taken_by, within

DRIFT = 2e-5
"""How far a step from the same moments may be from torch's, relative to the largest step that torch's takes: float32 arithmetic."""


def _twin(name: str, params: list[Tensor], options: dict[str, Any]) -> torch.optim.Optimizer | None:
    kept = {
        key: value
        for key, value in options.items()
        if key in ("lr", "weight_decay", "betas", "eps", "amsgrad", "maximize", "momentum", "nesterov")
    }
    if name.startswith("AdamW"):
        return torch.optim.AdamW(params, **{"lr": 1e-3, "weight_decay": 1e-2} | kept)
    if name.startswith("Adam"):
        return torch.optim.Adam(params, **{"lr": 1e-3} | kept)
    if name.startswith("SGD"):
        return torch.optim.SGD(params, **{"lr": 1e-3, "momentum": 0.9} | kept)
    return None


def trains(name: str, params: list[Tensor], steps: int = 3, under: str = "", **options: Any) -> None:
    """A few steps from the same gradients and moments as torch's optimizer, on float64 copies; wherever torch's takes these parameters."""
    leaves = [nn.Parameter(param.detach()) for param in params]  # keeps strides

    def torch_takes() -> None:
        copies = [nn.Parameter(param.detach().clone(memory_format=torch.preserve_format)) for param in params]
        twin = _twin(name, copies, options) or torch.optim.SGD(copies, lr=0.1)
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
        if twin is None:
            continue
        twin.step()
        for index, (mine, wide, old) in enumerate(zip(leaves, exact, before, strict=True)):
            way = float((wide.detach() - old).abs().amax()) if wide.numel() else 0.0
            allowed = steps * (DRIFT * way + 2 * UNIT[mine.dtype] * wide.detach().abs() + 1e-7 * way)
            within(mine.detach(), wide.detach(), allowed + 1e-7, f"parameter {index} of {list(mine.shape)}")
            with torch.no_grad():
                wide.copy_(mine)  # errors do not add up, and a moment that a format rounds to 0 is 0 for both
        for wide, moments in zip(exact, _moments(ours, name, leaves, options), strict=True):
            for moment, values in twin.state[wide].items():
                if moment != "step" and values is not None:
                    values.copy_(moments[moment])
    _round_trip(ours, name, leaves, options)


def _moments(
    ours: torch.optim.Optimizer, name: str, leaves: list[nn.Parameter], options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """What its moments stand for, in float32, for each parameter."""
    wide = options if name == "AdamW" else options | {"optim_bits": 32}
    copies = _clone(leaves)
    again = getattr(optim, name)(copies, **wide)
    again.load_state_dict(ours.state_dict())
    return [again.state[param] for param in copies]


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


def same_as_fresh(
    name: str,
    params: list[Tensor],
    change: Callable[[torch.optim.Optimizer, list[nn.Parameter]], Any],
    what: str,
    **options: Any,
) -> None:
    """After two steps and a change to state or parameters, a third step is that of a new optimizer that loads this state dict."""
    leaves = [nn.Parameter(param.detach()) for param in params]
    ours = getattr(optim, name)(leaves, **options)
    for _ in range(2):
        _give_gradients(leaves)
        ours.step()
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
    leaves = [nn.Parameter(param.detach()) for param in params]
    ours = getattr(optim, name)(leaves, **options)
    for _ in range(2):
        _give_gradients(leaves)
        ours.step()
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
    return code_map("dynamic8", True).float()


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
