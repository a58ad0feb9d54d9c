# SPDX-License-Identifier: Apache-2.0
"""The packed weight of a layer after a merge, and the bookkeeping of one call that merges many layers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.base import FormatConfig
from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.changed_weight import Change, change_between, quantize_anew, requantize
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.kinds import LayerWeight, kind_of, weights_of
from lowbit.quant.merge_options import CURRENT, MergeOptions
from lowbit.quant.merge_report import ENOUGH, MergeRow, lost_text
from lowbit.quant.packing import check_finite, pack_weight
from lowbit.quant.permuted_linear import PermutedLinear


@dataclass(slots=True)
class _Call:
    """One call that merges the adapters of a model: what its layers are called, and the rows of its report."""

    function: str
    names: dict[int, str] = field(default_factory=dict)
    inputs: Mapping[str, InputMoments] | None = None
    rows: list[MergeRow] = field(default_factory=list)


_CALL: ContextVar[_Call | None] = ContextVar("lowbit_merge_call", default=None)


@contextlib.contextmanager
def merge_call(function: str, model: nn.Module, bases: Mapping[str, nn.Module]) -> Iterator[None]:
    """Collect the rows of the layers that are merged within the block; after it, they are reported.

    Args:
        function: the function of peft.
        model: the model below peft's tuner, with its adapters.
        bases: the packed layers below adapters, by the names of their adapter layers.
    """
    options = _options()
    ids = set(map(id, bases.values()))
    given = None
    if options.calibrate is not None and any(weights_of(base)[0].experts is None for base in bases.values()):
        given = options.calibrate(model, lambda module, name: id(module) in ids)
    call = _Call(function, {id(base): name for name, base in bases.items()}, given)
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)
    options.report.rows += call.rows
    lost = [row for row in call.rows if row.kept < ENOUGH]
    if lost and CURRENT.get() is None:
        warnings.warn(f"{function}: {lost_text(lost)}", stacklevel=4)


def merged_weight(base: Any, wanted: Tensor) -> tuple[nn.Parameter, LinearSpec]:
    """Return the packed weight of a layer for the values of a merge ``[n, k]``, and how it is stored; the same
    parameter, if nothing has changed.

    Raises:
        ValueError: a value is not finite; the weight is 2:4 and `merging` was given no other format; or the calibration
            does not fit.
    """
    (names,) = weights_of(base)
    packed, layout = base._parameters[names.key], kind_of(base).layout_of(base)
    if packed.is_meta:
        return pack_weight(wanted, base.spec, layout=layout)[0], base.spec
    wanted = wanted.float()
    check_finite("merge", "weight with the adapter", wanted)
    call, format = _CALL.get() or _Call("merge"), _options().format
    name = call.names.get(id(base), "")
    inputs = _inputs(call.inputs, name, names.k) if kind_of(base).multiplies else None
    if isinstance(base, PermutedLinear):
        wanted, inputs = base.in_packed_order(wanted), inputs and inputs.in_order(base.permutation)
    stored, note = StoredWeight(base.spec, names.n, names.k, layout), ""
    weight = _in_own_format(packed, stored, wanted, inputs, format)
    change = Change() if weight is None else change_between(packed, stored, weight, stored, wanted, inputs)
    new = stored
    if format is not None and (weight is None or change.kept < ENOUGH):
        new = replace(stored, spec=_other_spec(base, format))
        weight = quantize_anew(packed, stored, wanted, new, inputs)
        new = replace(new, spec=replace(new.spec, algorithm=None))
        change = change_between(packed, stored, weight, new, wanted, inputs)
        note = f"was {base.spec.name}"
        if new.spec.is_float:
            note += ", float now: exact but for its dtype, and not quantized any more"
    size = packed.nbytes, weight.nbytes
    call.rows.append(MergeRow.of(name, new.spec.name, names.shape, size, change, note))
    return weight, new.spec


def merged_experts(base: Any, names: LayerWeight, wanted: Callable[[int], Tensor]) -> nn.Parameter:
    """Return the packed weight of all experts after a merge; the same parameter, if nothing has changed.

    Args:
        base: the packed module.
        names: its weight.
        wanted: returns the float32 values ``[n, k]`` of an expert by its number, as they should be.

    Raises:
        ValueError: a value is not finite; a 2:4 weight has changed; or `merging` was given a format, and experts lose
            more of their change than layers that keep theirs.
    """
    packed, call, options = base._parameters[names.key], _CALL.get() or _Call("merge"), _options()
    if packed.is_meta:
        return packed
    stored = replace(base.stored[names.key], layout=kind_of(base).layout_of(base), experts=None)
    merged, change = None, Change()
    for number in range(len(packed)):
        before, values = nn.Parameter(packed[number], requires_grad=False), wanted(number)
        check_finite("merge", f"expert {number} of {names.key} with the adapter", values)
        after = requantize(before, stored, values)
        change += change_between(before, stored, after, stored, values)
        if after is not before:
            merged = packed.detach().clone() if merged is None else merged
            merged[number] = after
    name = f"{call.names.get(id(base), '').removesuffix('.base_layer')}.{names.key}".removeprefix(".")
    if options.format is not None and change.kept < ENOUGH:
        raise ValueError(
            f"merging: format must be None for experts, which keep theirs: {name} in {stored.spec.name} keeps "
            f"{change.kept:.0%} of its change"
        )
    note = "" if options.calibrate is None else "packed experts are not calibrated"
    size = packed.nbytes, packed.nbytes
    call.rows.append(MergeRow.of(name, stored.spec.name, names.shape, size, change, note))
    return packed if merged is None else nn.Parameter(merged, requires_grad=False)


def _in_own_format(
    packed: nn.Parameter, stored: StoredWeight, wanted: Tensor, inputs: InputMoments | None, format: FormatConfig | None
) -> nn.Parameter | None:
    """Return the weight in the format that it has, or None where that has no room and another is given."""
    try:
        return requantize(packed, stored, wanted, inputs)
    except ValueError:
        if format is None or stored.spec.format != SEMI_SPARSE:
            raise
        return None


def _options() -> MergeOptions:
    return CURRENT.get() or MergeOptions()


def _other_spec(base: Any, format: FormatConfig) -> LinearSpec:
    """Return how the layer is stored in the format of `merging`, where float weights are of the layer's own dtype."""
    spec = format.spec(kind_of(base).dtype_of(base, torch.float32))
    return spec if kind_of(base).multiplies else replace(spec, x_format="float")


def _inputs(calibration: Mapping[str, InputMoments] | None, name: str, k: int) -> InputMoments | None:
    """Return the moments of a layer, which the calibration of a model with or without its adapters has seen."""
    if calibration is None:
        return None
    names = (name, f"{name}.base_layer", f"base_model.model.{name}.base_layer")
    inputs = next((calibration[one] for one in names if one in calibration), None)
    if inputs is None:
        raise ValueError(f"merging: calibration must have seen every merged layer, got none of {name or 'the layer'}")
    if not inputs.has_products:
        raise ValueError("merging: calibration must be of lowbit.calibrate(..., hessian=True), got one without")
    if len(inputs.squares) != k:
        raise ValueError(f"merging: calibration of {name} must be of k={k}, got {len(inputs.squares)}")
    return inputs
