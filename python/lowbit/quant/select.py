# SPDX-License-Identifier: Apache-2.0
"""Select the weights of quantize_, with every check that comes before the first change."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
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
from lowbit.quant.adapters import adapter_modules
from lowbit.quant.kinds import Kind, is_packed, is_trained, kind_of, weights_of
from lowbit.quant.output_head import head_layers
from lowbit.quant.packing import Selected, check_finite
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.read_weights import weights_that_are_read
from lowbit.tables.folding import folded

FilterFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Skipped:
    """A linear layer that stays as it is, and why."""

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
) -> tuple[list[Selected], list[Skipped]]:
    """Return the weights to quantize and the layers that are left, or raise; changes nothing.

    Args:
        kinds: the kinds of layers that may be selected.
        head: configuration of the output head of a language model, and of the table that is tied to it; None: the
            head is a layer like any other.
    """
    _check_filter(filter_fn, model)
    taken: list[tuple[str, nn.Module]] = []
    skipped: list[Skipped] = []
    claimed = _claimed(model)
    heads = head_layers(model) if head is not None else []
    if heads and id(heads[0]) in claimed:
        heads = []
    for name, module in model.named_modules():
        kind = kind_of(module)
        by_default = kind in kinds and kind.by_default
        claim = claimed.get(id(module), "")
        if claim == _ADAPTER:
            if by_default:
                skipped.append(Skipped(name, module, claim))
            continue
        reason = (_reason_to_skip(module, kind, config) if kind in kinds else "") or claim
        if filter_fn is None:
            if not by_default and (module not in heads or reason):
                continue
            if reason:
                skipped.append(Skipped(name, module, reason))
                continue
        elif not filter_fn(module, name):
            if by_default:
                skipped.append(Skipped(name, module, "not selected by filter_fn"))
            continue
        elif reason and not kind.serves_if_asked(module):
            raise ValueError(f"quantize_: {_label(name)} cannot be quantized: {reason}")
        check_module(name, module, device, kinds)
        taken.append((name, module))
    if strict and (not taken or (filter_fn is None and skipped)):
        lines = folded(skipped, attrgetter("reason"), lambda item: _label(item.name))
        left = "; ".join(f"{name}: {items[0].reason}" for name, items in lines) or "the model has no nn.Linear"
        raise ValueError(f"quantize_: strict=True and not every linear layer can be quantized: {left}")
    return _with_specs(model, [(name, module, head if module in heads else config) for name, module in taken]), skipped


_ADAPTER = "an adapter of peft, which is trained"


def _claimed(model: nn.Module) -> dict[int, str]:
    """Return, by the ids of layers, why code of a package that was imported wants their float weights."""
    claimed = weights_that_are_read(model) if "transformers" in sys.modules else {}
    return claimed | dict.fromkeys(adapters_in(model), _ADAPTER)


def adapters_in(model: nn.Module) -> set[int]:
    """Return the ids of the modules that are adapters of peft: none where it was not imported."""
    return adapter_modules(model) if "peft" in sys.modules else set()


def _check_filter(filter_fn: Any, model: nn.Module) -> None:
    if filter_fn is None:
        return
    wanted = "quantize_: filter_fn must be a function of (module, qualified name), True selects"
    if not callable(filter_fn):
        raise TypeError(f"{wanted}; got {type(filter_fn).__name__}")
    try:
        signature = inspect.signature(filter_fn)
    except (TypeError, ValueError):  # a callable of C tells nothing
        return
    try:
        signature.bind(model, "")
    except TypeError as error:
        raise TypeError(f"{wanted}; got one of {signature}") from error


def reason_to_skip(module: nn.Module) -> str:
    """Why a layer is not safe to take, or an empty string."""
    kind = kind_of(module)
    return "" if kind is None or is_packed(module) or is_trained(module) else kind.refuses(module)


def _reason_to_skip(module: nn.Module, kind: Kind, config: FormatConfig) -> str:
    """Why a layer is not safe to take, or not as ``config`` says; or an empty string."""
    if reason := reason_to_skip(module):
        return reason
    needs_inputs = isinstance(config.spec(torch.float32).algorithm, GPTQ)
    if needs_inputs and kind.multiplies and not kind.has_products and not is_packed(module):
        return f"GPTQ needs x x^T of its inputs, which calibrate does not keep of a {kind.name}"
    return ""


def check_module(name: str, module: Any, device: torch.device | None, kinds: Sequence[Kind] = (LINEAR,)) -> None:
    """Raise unless the layer is float, of one of these kinds, and has weights that can be packed."""
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
    """Return the names of the parameters that stay float, by their ids."""
    owners: dict[int, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        packed = {weight.key for weight in weights_of(module)} if id(module) in taken else ()
        for key, parameter in module._parameters.items():
            if parameter is not None and key not in packed:
                owners[id(parameter)].append(f"{prefix}.{key}" if prefix else key)
    return owners


def _check_looked_up(label: str, spec: LinearSpec) -> None:
    if spec.format == SEMI_SPARSE:
        raise ValueError(f"quantize_: {label} cannot be 2:4: it is looked up, not multiplied")
    if isinstance(spec.algorithm, GPTQ):
        raise ValueError(f"quantize_: GPTQ needs inputs, which {label} does not have")


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
