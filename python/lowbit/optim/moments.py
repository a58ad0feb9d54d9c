# SPDX-License-Identifier: Apache-2.0
"""The moments in the state of one parameter: which ones a rule keeps, their memory layout, and how they are created and
converted when the parameter or options change."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit._C import OPTIM_RULES
from lowbit.optim import sharding
from lowbit.optim.checks import check_param
from lowbit.optim.state_format import Layout, allocate, decode, encode, has_codes, nibble_bytes, scale_count


def of_rule(rule: str) -> dict[str, tuple[bool, str | None]]:
    """Return the moments that a rule may keep: name -> can be negative, and the option without which it is not kept."""
    return OPTIM_RULES[rule]["moments"]


@dataclass(frozen=True, slots=True)
class StateOptions:
    """The options of a param group that say which moments are kept, and how."""

    state_format: str
    min_8bit_size: int
    block_size: int
    moments: tuple[str, ...]

    @classmethod
    def of(cls, rule: str, group: dict[str, Any]) -> StateOptions:
        moments = tuple([name for name, (_, needs) in of_rule(rule).items() if needs is None or group[needs]])
        return cls(group["state_format"], group["min_8bit_size"], group["block_size"], moments)

    def layout(self, param: Tensor) -> Layout:
        """Return how the moments of a parameter are to lie in memory. Small ones stay float32; a DTensor counts
        whole, so that ranks agree."""
        is_small = has_codes(self.state_format) and param.numel() < self.min_8bit_size
        return Layout.of(sharding.local(param), "float32" if is_small else self.state_format, self.block_size)


def prepare(
    rule: str, options: StateOptions, param: Tensor, state: dict[str, Any], kept: Layout | None, owner: str
) -> Layout:
    """Make the state of a parameter, or convert it to the parameter's memory order and the options as they are now.

    Args:
        rule, options: they decide which moments are kept, and how.
        param: the parameter.
        state: its state, changed.
        kept: the current storage of the moments in ``state``; None: the one that is wanted.
        owner: the name of the optimizer, for errors.

    Returns:
        Their layout now.

    Raises:
        ValueError: no step could serve the parameter, or the state is not of its shape, or lacks a moment.
    """
    layout = options.layout(param)
    if state and kept in (None, layout) and all(name in state for name in options.moments):
        return layout
    check_param(param, owner)
    kept = (kept or layout) if state else None
    if kept is not None and kept.shape != layout.shape:
        if float(state["step"]) > 0:
            raise ValueError(
                f"{owner}: the state of a parameter of shape {list(kept.shape)} does not fit the data that it has now, "
                f"of shape {list(layout.shape)}; delete it from optimizer.state to begin anew"
            )
        kept = None  # zeros, of no use any more
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
        elif kept is None or needs is not None:  # one that an option asks for may come later, and begins with zeros
            values, scale = allocate(layout)
        else:
            raise ValueError(f"{owner}: the state of a parameter has no {name}, got {sorted(state)}")
        state.update(entries(param, name, values, scale, layout))
    return layout


def entries(param: Tensor, name: str, values: Tensor, scale: Tensor | None, layout: Layout) -> dict[str, Tensor]:
    """Return one moment of the local shard of ``param`` as entries of its state."""
    nibbles = layout.state_format == "dynamic4"
    stored = {name: sharding.row_like(param, values, nibble_bytes) if nibbles else sharding.like(param, values)}
    if scale is not None:
        stored[f"{name}_scale"] = sharding.row_like(param, scale, lambda numel: scale_count(numel, layout.block_size))
    return stored


def forget(layouts: dict[Tensor, Layout], state: dict[Tensor, Any]) -> None:
    """Take the layouts of parameters without a state away."""
    for param in [param for param in layouts if param not in state]:
        del layouts[param]
