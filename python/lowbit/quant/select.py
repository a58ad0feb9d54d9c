# SPDX-License-Identifier: Apache-2.0
"""Selection of the weights for quantize_, with all checks that are made before the first change."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lowbit import devices
from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.formats.float import FLOAT_FORMATS
from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.formats.spec import LinearSpec
from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adapter_modules, float_layers
from lowbit.quant.filter_fn import FilterFn, checked_filter, refuse_turned
from lowbit.quant.kinds import Kind, is_packed, is_trained, kind_of, weights_of
from lowbit.quant.output_head import head_layers
from lowbit.quant.packing import Selected, check_finite
from lowbit.quant.quant_experts import EXPERTS
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.read_weights import weights_that_are_read
from lowbit.quant.report import bytes_as_text
from lowbit.tables.folding import folded


@dataclass(frozen=True)
class Skipped:
    """A layer that stays unchanged, and the reason."""

    name: str
    module: nn.Module
    reason: str


def select(
    model: nn.Module,
    config: FormatConfig,
    filter_fn: FilterFn | None,
    device: torch.device | None,
    strict: bool,
    *,
    kinds: Sequence[Kind] = (LINEAR,),
    head: FormatConfig | None = None,
    packs: bool = True,
) -> tuple[list[Selected], list[Skipped]]:
    """Return the weights to quantize and the layers that are skipped. The model is not changed.

    Args:
        model, config, filter_fn, device, strict: the arguments of ``quantize_``.
        kinds: the kinds of layers that may be selected.
        head: configuration of a language model's output head, and of an embedding that is tied to it; None treats the
            head like any other layer.
        packs: whether the weights are packed, now or later. Then layers stay float that would grow by it, unless
            ``filter_fn`` selects them.

    Raises:
        TypeError, ValueError: what ``quantize_`` raises.
    """
    selects = None if filter_fn is None else checked_filter(filter_fn, model)
    taken: list[tuple[str, nn.Module]] = []
    skipped: list[Skipped] = []
    claimed = _claimed(model)
    heads = head_layers(model) if head is not None else []
    if heads and id(heads[0]) in claimed:
        heads = []
    gates = gates_of_experts(model)
    for name, module in model.named_modules():
        kind = kind_of(module)
        by_default = kind in kinds and kind.by_default
        claim = claimed.get(id(module), "")
        if claim == _ADAPTER:
            if by_default:
                skipped.append(Skipped(name, module, claim))
            continue
        reason = (reason_to_skip(module) if kind in kinds else "") or claim
        if selects is None:
            if not by_default and (module not in heads or reason):
                continue
            if not reason and packs and id(module) not in gates:
                reason = reason_of_size(module, head if module in heads else config)
            if reason:
                skipped.append(Skipped(name, module, reason))
                continue
        elif not selects(module, name):
            if by_default:
                skipped.append(Skipped(name, module, "not selected by filter_fn"))
            continue
        elif reason and not kind.serves_if_asked(module):
            raise ValueError(f"quantize_: {_label(name)} cannot be quantized: {reason}")
        check_module(name, module, device, kinds)
        taken.append((name, module))
    if selects is not None and not taken:
        refuse_turned(filter_fn, model, kinds)
    if strict and (not taken or (filter_fn is None and skipped)):
        lines = folded(skipped, attrgetter("reason"), lambda item: _label(item.name))
        left = "; ".join(f"{name}: {items[0].reason}" for name, items in lines) or "the model has no nn.Linear"
        raise ValueError(f"quantize_: with strict=True every linear layer must be one that can be quantized: {left}")
    return _with_specs(model, [(name, module, head if module in heads else config) for name, module in taken]), skipped


_ADAPTER = "an adapter of peft, which is trained"
_NEEDED = "an adapter of peft needs its float weight"


def _claimed(model: nn.Module) -> dict[int, str]:
    """Return the reasons why code of transformers or peft needs the float weights of layers, by the ids of the
    layers."""
    claimed = weights_that_are_read(model) if "transformers" in sys.modules else {}
    if "peft" in sys.modules:
        claimed |= dict.fromkeys(float_layers(model), _NEEDED)
    return claimed | dict.fromkeys(adapters_in(model), _ADAPTER)


def adapters_in(model: nn.Module) -> set[int]:
    """Return the ids of the modules that are peft adapters; an empty set if peft is not imported."""
    return adapter_modules(model) if "peft" in sys.modules else set()


def reason_to_skip(module: nn.Module) -> str:
    """Return the reason why a layer cannot safely be packed, or an empty string."""
    kind = kind_of(module)
    return "" if kind is None or is_packed(module) or is_trained(module) else kind.refuses(module)


def gates_of_experts(model: nn.Module) -> set[int]:
    """Return the ids of the linear layers that stand beside experts. A gate of shared experts has one row, which
    packing makes larger, but `fuse` makes one call of it and the experts only if it is packed."""
    return {
        id(child)
        for module in model.modules()
        if any(kind_of(child) is EXPERTS for child in module.children())
        for child in module.children()
        if kind_of(child) is LINEAR
    }


def reason_of_size(module: nn.Module, config: FormatConfig, dtype: torch.dtype | None = None) -> str:
    """Return why a layer should not be packed although it can: its few rows are padded to a panel, so that the packed
    weight is larger than the float one, and no call is faster, as half of the products or more are those of padding.
    Otherwise, and for float formats, which save no bytes, an empty string.

    Args:
        module: the layer.
        config: the configuration to pack it with.
        dtype: the dtype of the float weights; None takes that of the layer, which must be float then.
    """
    before = after = 0
    for weight in weights_of(module):
        value = module._parameters[weight.key]
        of_float = value.dtype if dtype is None else dtype
        if of_float not in FLOATS:
            return ""
        spec = config.spec(of_float)
        if spec.is_float:
            return ""
        try:
            if spec.shape(2 * weight.n, weight.k)[0] > 1:  # less than half of a panel is padding
                return ""
            after += weight.bytes(spec)
        except ValueError:  # the format cannot hold the weight, which is an error that names the layer, later
            return ""
        before += math.prod(weight.shape) * of_float.itemsize
    if after <= before:
        return ""
    return f"packing would not make it smaller or faster: {bytes_as_text(after)} instead of {bytes_as_text(before)}"


def check_module(name: str, module: Any, device: torch.device | None, kinds: Sequence[Kind] = (LINEAR,)) -> None:
    """Raise TypeError or ValueError unless the layer is float, of one of these kinds, and its weights can be packed."""
    if is_packed(module):
        raise ValueError(
            f"quantize_: {_label(name)} is already quantized as {module.spec.name}; "
            "select others with filter_fn, or go back with lowbit.dequantize_(model)"
        )
    if is_trained(module):
        raise ValueError(
            f"quantize_: {_label(name)} is being trained as {module.trained_as}; "
            f"select others with filter_fn, or end it with lowbit.training.{module.end}"
        )
    if kind_of(module) not in kinds:
        wanted = " and ".join(", ".join(kind.float_name for kind in kinds).rsplit(", ", 1))
        raise TypeError(
            f"quantize_: filter_fn must select {wanted} layers only, got {_label(name)}: {type(module).__name__}; "
            "it is asked about every module: begin it with `isinstance(module, torch.nn.Linear) and`"
        )
    for weight in weights_of(module):
        value = module._parameters[weight.key]
        label = f"{weight.key} of {_label(name)}"
        if type(value) is not nn.Parameter:
            raise TypeError(f"quantize_: {label} must be a plain nn.Parameter, got {type(value).__name__}")
        if value.dtype not in FLOATS:
            raise TypeError(f"quantize_: {label} must be float32, bfloat16 or float16, got {value.dtype}")
        if tuple(value.shape) != weight.float_shape:
            wanted = list(weight.float_shape)
            raise ValueError(f"quantize_: {label} must have shape {wanted}, got {list(value.shape)}")
        bias = module._parameters.get(weight.bias)
        if bias is not None and bias.dtype not in FLOATS:
            got = bias.dtype
            raise TypeError(
                f"quantize_: {weight.bias} of {_label(name)} must be float32, bfloat16 or float16, got {got}"
            )
        there = value.device
        multiplies = kind_of(module).multiplies
        served = devices.has_kernels(there) or (multiplies and devices.places.has_rows("linear", there))
        if not served and there.type != "meta" and device is None:
            raise ValueError(f'quantize_: {label} must be on the cpu, got device={there}; device="cpu" moves it')


def _with_specs(model: nn.Module, taken: list[tuple[str, nn.Module, FormatConfig]]) -> list[Selected]:
    owners = _owners_of_float_weights(model, {id(module) for _, module, _ in taken})
    selected, checked = [], set()
    for name, module, config in taken:
        for weight in weights_of(module):
            value = module._parameters[weight.key]
            spec = config.spec(value.dtype)
            if not kind_of(module).multiplies:
                _check_looked_up(f"the {kind_of(module).name} {_label(name)}", spec)
            if id(value) not in checked:
                label = f"{weight.key} of {_label(name)}"
                _check_values(label, value, spec)
                if reason := config.refuses(weight.matrix(value.detach()).flatten(0, -2)):
                    raise ValueError(f"quantize_: {label} {reason}")
                checked.add(id(value))
            others = owners[id(value)]
            note = f"untied from {', '.join(others)}, which stays float" if others else ""
            selected.append(Selected.of(name, module, weight, spec, value, note))
    return selected


def _owners_of_float_weights(model: nn.Module, taken: Container[int]) -> dict[int, list[str]]:
    """Return the names of the parameters that stay float, by the ids of the parameters."""
    owners: dict[int, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        packed = {weight.key for weight in weights_of(module)} if id(module) in taken else ()
        for key, parameter in module._parameters.items():
            if parameter is not None and key not in packed:
                owners[id(parameter)].append(f"{prefix}.{key}" if prefix else key)
    return owners


def _check_looked_up(label: str, spec: LinearSpec) -> None:
    if spec.format == SEMI_SPARSE:
        raise ValueError(
            f"quantize_: the format of {label} must not be 2:4, which is for products: its rows are looked up"
        )
    if isinstance(spec.algorithm, GPTQ):
        raise ValueError(
            f"quantize_: algorithm must not be GPTQ for {label}, whose rows are looked up: GPTQ needs inputs"
        )


def _check_values(label: str, weight: torch.Tensor, spec: LinearSpec) -> None:
    if weight.device.type == "meta":
        return
    check_finite("quantize_", label, weight)
    if not spec.is_float:
        return
    most = torch.finfo(next(dtype for dtype, name in FLOAT_FORMATS.items() if name == spec.format)).max
    if most < torch.finfo(weight.dtype).max:
        largest = max(abs(float(value)) for value in torch.aminmax(weight.detach()))
        if largest > most:
            raise ValueError(f"quantize_: {label} must be within +-{most:g} for {spec.format}, got {largest:g}")


def _label(name: str) -> str:
    return name or "the model itself"
