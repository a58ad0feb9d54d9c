# SPDX-License-Identifier: Apache-2.0
"""Reading of one parameter's saved state, from any of the packages: all entries are checked, and moments are returned
with their layout.

| saved by | a moment | its scales | recognized by |
|---|---|---|---|
| lowbit | `exp_avg`: values, or codes | `exp_avg_scale` | `state_format` in the param group |
| bitsandbytes | `state1`: values, or 8-bit codes of `qmap1` | `absmax1` | the name |
| torchao | `exp_avg`: a tensor with `codes`, `scale` and `qmap` | | `codes` |
| torch | `exp_avg`: values | | none of the above |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lowbit.optim import correction, sharding
from lowbit.optim.moments import StateOptions, of_rule
from lowbit.optim.state_format import Layout, allocate, decode, has_codes, nibble_bytes, scale_count

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BITSANDBYTES_NESTED = "__bnb_optimizer_quant_state__"  # a nested dict that hides tensors from FSDP
_BITSANDBYTES_BLOCKS = (256, 2048)  # block sizes since version 0.44, and before
_BITSANDBYTES_NORM = "unorm_vec"  # the state of max_unorm, which lowbit does not have


@dataclass(slots=True)
class Moment:
    """A copy of one moment as it was saved, in the memory order of its layout."""

    values: Tensor
    scale: Tensor | None
    layout: Layout
    is_signed: bool


@dataclass(slots=True)
class Entry:
    """The saved state of one parameter."""

    rule: str  # rule of the optimizer that loads it
    owner: str  # class name of that optimizer
    saved_group: dict[str, Any]
    group: dict[str, Any]  # the param group after loading
    param: Tensor
    state: dict[str, Any]
    what: str  # description for error messages

    def __post_init__(self) -> None:
        nested = self.state.get(_BITSANDBYTES_NESTED, {})
        if not isinstance(nested, dict):
            raise ValueError(f"{self.what}: {_BITSANDBYTES_NESTED} must be a dict, got {type(nested).__name__}")
        self.state = {name: value for name, value in self.state.items() if name != _BITSANDBYTES_NESTED} | nested

    @property
    def is_ours(self) -> bool:
        return "state_format" in self.saved_group

    @property
    def is_of_bitsandbytes(self) -> bool:
        return not self.is_ours and "state1" in self.state

    def step(self) -> float:
        """Return the number of steps taken."""
        if "step" not in self.state and not self.is_ours and self.rule != "adamw":
            return 1.0  # torch's SGD does not count steps; all that matters is whether there was one
        step = self.state.get("step")
        is_number = isinstance(step, Real)
        if isinstance(step, Tensor):
            is_number = (
                step.numel() == 1 and step.layout is torch.strided and not step.is_complex() and not step.is_meta
            )
        if not is_number or not 0 <= float(step) < math.inf:
            raise ValueError(f"{self.what}: step must be a number from 0 on, got {step}")
        return float(step)


def options_of(group: dict[str, Any], rule: str) -> dict[str, Any]:
    """Return the options of another package's param group under the names of lowbit."""
    if rule != "sgd" or "momentum" in group or "betas" not in group:
        return group
    betas = group["betas"]  # where bitsandbytes' SGD stores momentum and dampening
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"Invalid betas value: {betas}, must be momentum and dampening")
    others = {
        name: value for name, value in group.items() if name not in ("betas", "eps", "alpha", "t_alpha", "t_beta3")
    }
    return {**others, "momentum": betas[0], "dampening": betas[1]}


def read(entry: Entry) -> dict[str, Moment] | None:
    """Return the moments by name, or None if torch's SGD has taken no step with momentum.

    Raises:
        ValueError: an entry is missing or unknown, or its type, dtype, shape or device does not fit the parameter and
            its group.
    """
    every = {name: is_signed for name, (is_signed, _) in of_rule(entry.rule).items()}
    amsgrad = entry.saved_group.get("amsgrad", False)
    needed = StateOptions.of(entry.rule, {**entry.group, "amsgrad": amsgrad}).moments
    if not entry.param.is_floating_point():
        raise ValueError(
            f"{entry.what} must be empty for a parameter of {entry.param.dtype}, got {sorted(entry.state)}"
        )
    _check_names(entry, every)
    moments = {}
    for position, (name, is_signed) in enumerate(every.items(), 1):
        values = entry.state.get(f"state{position}" if entry.is_of_bitsandbytes else name)
        if values is not None:
            moments[name] = _moment(entry, name, position, values, is_signed)
        elif name in needed:
            if name in entry.state and entry.rule == "sgd" and not entry.is_ours:
                return None
            raise ValueError(f"{entry.what} must have {name}, got {sorted(entry.state)}")
    entry.step()
    return moments


def read_correction(entry: Entry) -> Tensor | None:
    """Return the saved correction of the local parameter, or None if there is none.

    Raises:
        ValueError: its type, dtype or shape does not fit the parameter.
    """
    saved = entry.state.get(correction.NAME)
    if saved is None:
        return None
    saved = sharding.local(saved)
    _check(saved, (torch.int8,), sharding.local(entry.param).shape, f"{entry.what}: {correction.NAME}")
    return saved


def _check_names(entry: Entry, moments: dict[str, bool]) -> None:
    if entry.is_of_bitsandbytes:
        known = [
            f"{name}{position}" for position in range(1, len(moments) + 1) for name in ("state", "qmap", "absmax")
        ] + [_BITSANDBYTES_NORM]
    else:
        known = [*moments, *(f"{name}_scale" for name in moments if entry.is_ours)]
        known += [correction.NAME] * entry.is_ours
    if unknown := [name for name in entry.state if name not in ("step", *known)]:
        raise ValueError(f"{entry.what} must hold entries of {entry.owner} only, got {', '.join(map(str, unknown))}")


def _moment(entry: Entry, name: str, position: int, values: Any, is_signed: bool) -> Moment:
    if entry.is_ours:
        return _of_ours(entry, name, values, is_signed)
    what, local = f"{entry.what}: {name}", sharding.local(entry.param)
    if entry.is_of_bitsandbytes:
        scale = entry.state.get(f"absmax{position}")
        if scale is None:
            return _floats(values, local, is_signed, what)
        block_size = next(
            (size for size in _BITSANDBYTES_BLOCKS if _length(scale) == scale_count(local.numel(), size)),
            _BITSANDBYTES_BLOCKS[0],
        )
        return _codes(
            values,
            scale,
            _layout_like(values, local, "dynamic8", block_size),
            is_signed,
            what,
            entry.state.get(f"qmap{position}"),
        )
    values = sharding.local(values)
    return (
        _of_torchao(values, local, is_signed, what)
        if hasattr(values, "codes")
        else _floats(values, local, is_signed, what)
    )


def _of_ours(entry: Entry, name: str, values: Any, is_signed: bool) -> Moment:
    what, local, group = f"{entry.what}: {name}", sharding.local(entry.param), entry.saved_group
    wanted = StateOptions.of(entry.rule, group).layout(entry.param)
    scale = entry.state.get(f"{name}_scale")
    if (scale is not None) != has_codes(wanted.state_format):
        raise ValueError(
            f"{what} must have {'' if scale is None else 'no '}scales in state_format {wanted.state_format}"
        )
    for tensor in (values, *(() if scale is None else (scale,))):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{what} must be a tensor, got {type(tensor).__name__}")
    values, scale = sharding.local_moment(values, scale, wanted)
    if scale is None:
        _check(values, (wanted.dtype,), local.shape, what)
        return _floats(values, local, is_signed, what)
    if wanted.state_format != "dynamic4":  # codes are in the memory order of the saved parameter
        wanted = _layout_like(values, local, wanted.state_format, wanted.block_size)
    return _codes(values, scale, wanted, is_signed, what)


def _of_torchao(state: Any, local: Tensor, is_signed: bool, what: str) -> Moment:
    codes, scale, qmap = state.codes, state.scale, getattr(state, "qmap", None)
    if codes.dtype == torch.float8_e4m3fn:
        state_format, codes = "float8", codes.view(torch.uint8)
    else:
        state_format = "dynamic4" if codes.numel() < local.numel() else "dynamic8"
    by_rows = torch.empty(local.shape, device="meta")
    rows = replace(
        Layout.of(by_rows, state_format, max(1, local.numel() // max(1, scale.numel()))), device=local.device
    )
    if rows.block_size & (rows.block_size - 1):
        raise ValueError(
            f"{what} must have one scale for each block of a power of two of elements, got {scale.numel()} scales for "
            f"{local.numel()} elements"
        )
    return _codes(codes, scale, rows, is_signed, what, qmap)


def _floats(values: Any, local: Tensor, is_signed: bool, what: str) -> Moment:
    _check(values, _FLOATS, local.shape, what)
    layout = Layout.of(local, "bfloat16" if values.dtype == torch.bfloat16 else "float32", 0)
    return Moment(layout.empty(layout.dtype).copy_(values), None, layout, is_signed)


def _codes(values: Any, scale: Any, layout: Layout, is_signed: bool, what: str, qmap: Any = None) -> Moment:
    shape = (nibble_bytes(layout.numel),) if layout.state_format == "dynamic4" else layout.shape
    _check(values, (torch.uint8,), shape, what)
    _check(scale, (torch.float32,), (layout.scales,), f"{what}: scales in blocks of {layout.block_size}")
    if qmap is not None:
        _check_map(qmap, layout.state_format, is_signed, f"{what}: qmap")
    codes, scales = allocate(layout)
    return Moment(codes.copy_(values), scales.copy_(scale), layout, is_signed)


def _check(tensor: Any, dtypes: tuple[torch.dtype, ...], shape: Sequence[int], what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ValueError(f"{what} must be a dense tensor with data, got {tensor.layout} on {tensor.device}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{what} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{what} must have shape {list(shape)}, got {list(tensor.shape)}")


def _check_map(qmap: Any, state_format: str, is_signed: bool, what: str) -> None:
    """Raise ValueError unless the saved codes have the same meaning as those of lowbit."""
    count = 16 if state_format == "dynamic4" else 256
    _check(qmap, _FLOATS, (count,), what)
    codes = torch.arange(count, dtype=torch.uint8, device="cpu")
    packed = codes[::2] << 4 | codes[1::2] if state_format == "dynamic4" else codes
    ones = torch.ones(1, dtype=torch.float32, device="cpu")
    ours = decode(packed.contiguous(), ones, Layout(state_format, 256, (count,), None), is_signed)
    if not torch.allclose(ours, qmap.float().cpu(), rtol=0, atol=1e-6):
        raise ValueError(f"{what} must be the map of {state_format}, got another one")


def _layout_like(values: Any, local: Tensor, state_format: str, block_size: int) -> Layout:
    """Return a layout with the memory order of saved codes, on the device of the parameter. If the codes are invalid,
    which is checked later, the order of the parameter is used."""
    readable = isinstance(values, Tensor) and values.layout is torch.strided and values.shape == local.shape
    return replace(Layout.of(values if readable else local, state_format, block_size), device=local.device)


def _length(scale: Any) -> int:
    return scale.numel() if isinstance(scale, Tensor) else 0
