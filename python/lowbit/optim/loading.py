# SPDX-License-Identifier: Apache-2.0
"""Loading of state dicts of lowbit, and of torch, torchao and bitsandbytes for the same rule.

torch's `Optimizer.load_state_dict` would cast codes and scales to the dtype of the parameter. So the state of every
parameter is first checked and converted, then passes through torch's code inside a `_Held` object, which torch does not
inspect, and is unwrapped afterwards. Options about the storage of the state, such as `state_format`, remain those of
this optimizer; lr and the options of the rule come from the checkpoint.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.optim import correction, moments, saved_state, sharding
from lowbit.optim.moments import StateOptions
from lowbit.optim.state_format import Layout, decode, encode, has_codes

_OF_TORCH = "differentiable"  # an option that torch adds to the defaults in the first load
_KEPT_OPTIONS = ("state_format", "block_size", "min_8bit_size", "bf16_stochastic_round", "master", "rounding_seed")


@dataclass(frozen=True, slots=True)
class Target:
    """The optimizer that a state dict is loaded into, with information that torch's class does not have."""

    optimizer: torch.optim.Optimizer
    rule: str
    check_group: Callable[[dict[str, Any]], None]  # raises ValueError for options out of range
    layouts: dict[Tensor, Layout]  # layouts of the moments in its state; loading updates them

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__


@dataclass(slots=True)
class _Held:
    """The state of one parameter while it passes through torch's loader."""

    state: dict[str, Any]
    layout: Layout


def load(target: Target, torch_load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Load ``state_dict`` with torch's loader, which also runs the user's hooks. If it does not fit, nothing
    changes."""
    optimizer = target.optimizer
    before = optimizer.register_load_state_dict_pre_hook(lambda _, given: _hold(target, given))
    after = optimizer.register_load_state_dict_post_hook(lambda _: _release(target), prepend=True)
    try:
        torch_load(state_dict)
    finally:
        before.remove()
        after.remove()


def _hold(target: Target, state_dict: dict[str, Any]) -> dict[str, Any]:
    call = f"{target.name}.load_state_dict"
    check_outline(state_dict, call)
    saved_groups, groups = state_dict["param_groups"], target.optimizer.param_groups
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        return state_dict  # torch's loader raises the error
    _check_keys(state_dict, call)
    merged = [
        _merged_group(target, saved, group, f"{call}: param group {number}")
        for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True))
    ]
    state, again = dict(state_dict["state"]), Counter[str]()
    for saved, new, group in zip(saved_groups, merged, groups, strict=True):
        for index, param in zip(saved["params"], group["params"], strict=True):
            if state.get(index):
                what = f"{call}: parameter {index}"
                entry = saved_state.Entry(target.rule, target.name, saved, new, param, state[index], what)
                if held := _convert(entry, again):
                    state[index] = held
                else:
                    del state[index]
    for change, count in again.items():
        warnings.warn(f"{call}: {count} {change}", stacklevel=2)
    return {**state_dict, "state": state, "param_groups": merged}


def check_outline(state_dict: Any, call: str) -> None:
    """Raise ValueError unless this is a state dict with param groups, which list parameters, and states."""
    groups, state = (
        state_dict.get(name) if isinstance(state_dict, dict) else None for name in ("param_groups", "state")
    )
    if not isinstance(groups, list) or not isinstance(state, dict):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise ValueError(f"{call}: state_dict must be a dict with a list param_groups and a dict state, got {got}")
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"{call}: param group {number} must be a dict with a list params")


def _check_keys(state_dict: dict[str, Any], call: str) -> None:
    """Raise ValueError unless every parameter is listed once, and every state is a dict that belongs to one of them."""
    listed = [index for group in state_dict["param_groups"] for index in group["params"]]
    names = set(listed)
    if len(names) != len(listed):
        raise ValueError(f"{call}: params of param_groups must name every parameter once, got {listed}")
    for index, entry in state_dict["state"].items():
        if index not in names:
            raise ValueError(f"{call}: state is for parameters that param_groups list, got {index!r}")
        if not isinstance(entry, dict):
            raise ValueError(f"{call}: state of parameter {index} must be a dict, got {type(entry).__name__}")


def _merged_group(target: Target, saved: dict[str, Any], group: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the param group after loading."""
    is_ours = "state_format" in saved
    try:
        given = {"master": None, **saved} if is_ours else saved_state.options_of(saved, target.rule)
        defaults = {name: value for name, value in target.optimizer.defaults.items() if name != _OF_TORCH}
        needed = [name for name in defaults if is_ours or name in ("lr", "weight_decay", "betas", "momentum")]
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"it must have {', '.join(missing)}, got {sorted(map(str, saved))}")
        target.check_group({**defaults, **given})
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return {**defaults, **given, **{name: group[name] for name in _KEPT_OPTIONS}}


def _convert(entry: saved_state.Entry, again: Counter[str]) -> _Held | None:
    """Return the state of one parameter in the layout of this optimizer, or None if it has taken no step. Conversions
    that lose precision are counted in ``again``."""
    saved = saved_state.read(entry)
    if saved is None:
        return None
    options = StateOptions.of(entry.rule, entry.group)
    layout, converted = options.layout(entry.param), {}
    for name, moment in saved.items():
        values, scale = moment.values, moment.scale
        if moment.layout != layout:
            if has_codes(moment.layout.state_format) and has_codes(layout.state_format):
                again[f"moments are encoded again, from {moment.layout} to {layout}"] += 1
            values, scale = encode(decode(values, scale, moment.layout, moment.is_signed), layout, moment.is_signed)
        converted |= moments.entries(entry.param, name, values, scale, layout)
    corrected = saved_state.read_correction(entry)
    if corrected is not None and options.corrects(entry.param):
        values = layout.empty(torch.int8).copy_(corrected)
        converted[correction.NAME] = sharding.like(entry.param, values)
    elif corrected is not None:
        again["corrections are left out, because they need bfloat16 parameters and master"] += 1
    return _Held({"step": torch.tensor(entry.step(), dtype=torch.float32, device=layout.device), **converted}, layout)


def _release(target: Target) -> None:
    state = target.optimizer.state
    for param, held in state.items():
        if isinstance(held, _Held):
            state[param], target.layouts[param] = held.state, held.layout
    moments.forget(target.layouts, state)
