# SPDX-License-Identifier: Apache-2.0
"""The moments, and the correction, in the state of one parameter: which ones there are, their memory layout, their
creation, and their conversion when the parameter or the options change."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit._C import OPTIM_RULES
from lowbit.optim import correction, sharding
from lowbit.optim.checks import check_param
from lowbit.optim.state_format import Layout, allocate, decode, encode, has_codes, nibble_bytes, scale_count


def of_rule(rule: str) -> dict[str, tuple[bool, str | None]]:
    """Return the moments of a rule: name -> (whether it can be negative, the option that it requires or None)."""
    return OPTIM_RULES[rule]["moments"]


@dataclass(frozen=True, slots=True)
class StateOptions:
    """The options of a param group that determine which moments and corrections exist and how they are stored."""

    state_format: str
    min_8bit_size: int
    block_size: int
    master: str | None
    moments: tuple[str, ...]

    @classmethod
    def of(cls, rule: str, group: dict[str, Any]) -> StateOptions:
        moments = tuple([name for name, (_, needs) in of_rule(rule).items() if needs is None or group[needs]])
        return cls(group["state_format"], group["min_8bit_size"], group["block_size"], group.get("master"), moments)

    def corrects(self, param: Tensor) -> bool:
        """Return whether a parameter has a correction."""
        return self.master is not None and param.dtype == torch.bfloat16

    def layout(self, param: Tensor) -> Layout:
        """Return the memory layout for the moments of a parameter. Small parameters have float32 moments; the size of a
        DTensor is its global size, so that ranks agree."""
        is_small = has_codes(self.state_format) and param.numel() < self.min_8bit_size
        return Layout.of(sharding.local(param), "float32" if is_small else self.state_format, self.block_size)


def prepare(
    rule: str, options: StateOptions, param: Tensor, state: dict[str, Any], kept: Layout | None, owner: str
) -> Layout:
    """Create the state of a parameter, or convert it to the current memory order and options.

    Args:
        rule, options: determine which moments exist and how they are stored, and whether there is a correction.
        param: the parameter.
        state: its state, which is changed in place.
        kept: the current layout of the moments in ``state``; None if it is the required one.
        owner: the name of the optimizer, for error messages.

    Returns:
        The new layout of the moments.

    Raises:
        ValueError: the parameter is not supported, its state has another shape, or a moment is missing.
    """
    layout, corrects = options.layout(param), options.corrects(param)
    is_complete = all(name in state for name in options.moments) and (correction.NAME in state) == corrects
    if state and kept in (None, layout) and is_complete:
        return layout
    check_param(param, owner, options.master)
    kept = (kept or layout) if state else None
    if kept is not None and kept.shape != layout.shape:
        if float(state["step"]) > 0:
            raise ValueError(
                f"{owner}: the state of a parameter must be for its shape {list(layout.shape)}, got one for "
                f"{list(kept.shape)}; delete it from optimizer.state to begin anew"
            )
        kept = None  # no step was taken, so the moments are zeros and can be discarded
    if kept is None:
        state.clear()
        state["step"] = torch.zeros((), dtype=torch.float32, device=layout.device)
    elif (
        kept != layout and has_codes(kept.state_format) and has_codes(layout.state_format) and float(state["step"]) > 0
    ):
        warnings.warn(f"{owner}: moments are encoded again, from {kept} to {layout}", stacklevel=2)
    for name, (is_signed, needs) in of_rule(rule).items():
        if name in state and kept not in (None, layout):
            local = sharding.local_moment(state[name], state.pop(f"{name}_scale", None), kept)
            values, scale = encode(decode(*local, kept, is_signed), layout, is_signed)
        elif name in state or name not in options.moments:
            continue
        elif kept is None or needs is not None:  # an option may add a moment later; it starts at zero
            values, scale = allocate(layout)
        else:
            raise ValueError(f"{owner}: the state of a parameter must have {name}, got {sorted(state)}")
        state.update(entries(param, name, values, scale, layout))
    correction.prepare(param, state, layout, wanted=corrects, is_reordered=kept not in (None, layout))
    return layout


def entries(param: Tensor, name: str, values: Tensor, scale: Tensor | None, layout: Layout) -> dict[str, Tensor]:
    """Return the state entries for one moment of the local shard of ``param``."""
    nibbles = layout.state_format == "dynamic4"
    stored = {name: sharding.row_like(param, values, nibble_bytes) if nibbles else sharding.like(param, values)}
    if scale is not None:
        stored[f"{name}_scale"] = sharding.row_like(param, scale, lambda numel: scale_count(numel, layout.block_size))
    return stored


def forget(layouts: dict[Tensor, Layout], state: dict[Tensor, Any]) -> None:
    """Remove the layouts of parameters that have no state."""
    for param in [param for param in layouts if param not in state]:
        del layouts[param]
