# SPDX-License-Identifier: Apache-2.0
"""Loading of state dicts: our own, and those of torch, torchao and bitsandbytes for the same rule.

torch's `Optimizer.load_state_dict` would cast codes and scales to the dtype of the parameter. So every parameter's state is
read and converted first, passes torch's code inside a `_Held` that it does not look into, and is unpacked after. Options of how
state is kept (`state_format` and the like) stay those of this optimizer; lr and the rule's options come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.optim import sharding
from lowbit.optim.state_format import allocate, decode, encode, has_codes, nibble_bytes, scale_count

if TYPE_CHECKING:
    from lowbit.optim.base import LowBitOptimizer

_KEPT_OPTIONS = ("state_format", "block_size", "min_8bit_size", "bf16_stochastic_round", "rounding_seed")
_BITSANDBYTES_NESTED = "__bnb_optimizer_quant_state__"  # hides its tensors from FSDP
_BITSANDBYTES_BLOCK = 256


@dataclass(slots=True)
class _Held:
    """State of one parameter on its way through torch's loader."""

    state: dict[str, Any]


@dataclass(slots=True)
class _Moment:
    """One moment as it was saved."""

    values: Tensor
    scale: Tensor | None
    state_format: str
    block_size: int


def load(optimizer: LowBitOptimizer, torch_load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Load ``state_dict`` through torch's loader, which also runs the user's hooks; nothing changes if it does not fit."""
    before = optimizer.register_load_state_dict_pre_hook(_hold)
    after = optimizer.register_load_state_dict_post_hook(_release, prepend=True)
    try:
        torch_load(state_dict)
    finally:
        before.remove()
        after.remove()


def _hold(optimizer: LowBitOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        return state_dict  # torch's loader says what is wrong
    state = dict(state_dict["state"])
    for saved, group in zip(saved_groups, groups, strict=True):
        for index, param in zip(saved["params"], group["params"], strict=True):
            if state.get(index):
                state[index] = _Held(_convert(optimizer, group, param, _flat(state[index]), saved, f"parameter {index}"))
    merged = [
        {**saved, **{name: group[name] for name in _KEPT_OPTIONS}} for saved, group in zip(saved_groups, groups, strict=True)
    ]
    return {**state_dict, "state": state, "param_groups": merged}


def _release(optimizer: LowBitOptimizer) -> None:
    for param, held in optimizer.state.items():
        if isinstance(held, _Held):
            optimizer.state[param] = held.state


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, **entry.get(_BITSANDBYTES_NESTED, {})}


def _convert(
    optimizer: LowBitOptimizer, group: dict[str, Any], param: Tensor, entry: dict[str, Any], saved: dict[str, Any], what: str
) -> dict[str, Any]:
    """Return the state of one parameter in the format that it has in this optimizer."""
    local, block_size = sharding.local(param).detach(), group["block_size"]
    wanted = optimizer._format_of(group, param)
    found = {}
    for position, (name, is_signed) in enumerate(optimizer._moments({**saved, **{"amsgrad": saved.get("amsgrad", False)}}).items(), 1):
        moment = _read(entry, name, position, local, saved, f"{type(optimizer).__name__}.load_state_dict: {what}")
        if moment is None:
            return {}
        if moment.state_format == wanted and (moment.scale is None or moment.block_size == block_size):
            values, scale = allocate(local, wanted, block_size)
            values.copy_(moment.values.view(values.shape))
            if scale is not None:
                scale.copy_(moment.scale)
        else:
            as_float = decode(moment.values, moment.scale, local, moment.state_format, is_signed, moment.block_size)
            values, scale = encode(as_float, wanted, is_signed, block_size)
        found.update(optimizer._stored(param, name, values, scale, wanted, block_size))
    return {"step": torch.tensor(float(entry.get("step", 1.0))), **found}


def _read(entry: dict[str, Any], name: str, position: int, local: Tensor, saved: dict[str, Any], what: str) -> _Moment | None:
    """Find one moment in the state of a parameter, whoever saved it; None where it was never used."""
    if f"state{position}" in entry:  # bitsandbytes
        values, scale = entry[f"state{position}"], entry.get(f"absmax{position}")
        moment = _Moment(values, scale, "float32" if scale is None else "dynamic8", _BITSANDBYTES_BLOCK)
    elif name not in entry:
        raise ValueError(f"{what} has no {name}, got {sorted(entry)}")
    elif entry[name] is None:
        return None
    else:
        values = sharding.local(entry[name])
        if hasattr(values, "codes"):  # torchao
            moment = _of_torchao(values, local)
        elif f"{name}_scale" in entry:
            state_format, block_size = saved["state_format"], saved["block_size"]
            scale = sharding.local_scale(entry[f"{name}_scale"], local, block_size)
            moment = _Moment(sharding.local_state(values, local, state_format), scale, state_format, block_size)
        else:
            moment = _Moment(values, None, "bfloat16" if values.dtype == torch.bfloat16 else "float32", 0)
    _check_size(moment, local, f"{what}: {name}")
    return moment


def _of_torchao(state: Any, local: Tensor) -> _Moment:
    codes, scale = state.codes, state.scale
    if codes.dtype == torch.float8_e4m3fn:
        state_format, codes = "float8", codes.view(torch.uint8)
    else:
        state_format = "dynamic4" if codes.numel() < local.numel() else "dynamic8"
    return _Moment(codes, scale, state_format, local.numel() // max(1, scale.numel()))


def _check_size(moment: _Moment, local: Tensor, what: str) -> None:
    wanted = nibble_bytes(local.numel()) if moment.state_format == "dynamic4" else local.numel()
    if moment.values.numel() != wanted:
        raise ValueError(f"{what} must have {wanted} entries for a parameter of shape {list(local.shape)}, got {moment.values.numel()}")
    if moment.scale is not None and moment.scale.numel() != scale_count(local.numel(), moment.block_size):
        raise ValueError(
            f"{what} must have {scale_count(local.numel(), moment.block_size)} scales of {moment.block_size} elements, got {moment.scale.numel()}"
        )
    if has_codes(moment.state_format) and moment.values.dtype != torch.uint8:
        raise ValueError(f"{what} must have uint8 codes, got {moment.values.dtype}")
