# SPDX-License-Identifier: Apache-2.0
"""Select the layers of quantize_, with every check that comes before the first change."""

from __future__ import annotations

import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lowbit import _C, devices
from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.formats.float import FLOAT_FORMATS
from lowbit.formats.semi_sparse import FORMAT as SEMI_SPARSE
from lowbit.formats.spec import LinearSpec
from lowbit.ops.fakes import FLOATS
from lowbit.quant.adapters import adapter_modules
from lowbit.quant.calibration import Calibration, calibrate
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.linear_layers import (
    features_of,
    is_conv1d,
    is_embedding,
    is_fake_quantized,
    is_linear,
    is_scaled_embedding,
    is_trained,
    matrix_of,
)
from lowbit.quant.output_head import head_layers
from lowbit.quant.packing import all_finite
from lowbit.quant.quant_embedding import QuantEmbedding
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.read_weights import weights_that_are_read
from lowbit.tables.folding import folded, told

FilterFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Selected:
    """A layer to quantize."""

    name: str
    module: nn.Module  # nn.Linear, Conv1D or nn.Embedding
    spec: LinearSpec
    kernel: str
    note: str  # for the report


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
    embeddings: bool = False,
    head: FormatConfig | None = None,
) -> tuple[list[Selected], list[Skipped]]:
    """Return the layers to quantize and the linear layers that are left, or raise; changes nothing.

    Args:
        embeddings: filter_fn may select nn.Embedding.
        head: configuration of the output head of a language model, and of the table that is tied to it; None: the
            head is a layer like any other.
    """
    _check_filter(filter_fn, model)
    taken: list[tuple[str, nn.Module]] = []
    skipped: list[Skipped] = []
    adapters = adapter_modules(model)
    read = weights_that_are_read(model)
    heads = head_layers(model) if head is not None else []
    if heads and id(heads[0]) in read:
        heads = []
    tables = {id(table) for table in heads[1:] if filter_fn is None and not embedding_reason(table)}
    for name, module in model.named_modules():
        if id(module) in adapters:
            if is_linear(module):
                skipped.append(Skipped(name, module, "an adapter of peft, which is trained"))
            continue
        reason = reason_to_skip(module) or read.get(id(module), "")
        if filter_fn is None:
            if not is_linear(module) and id(module) not in tables:
                continue
            if reason:
                skipped.append(Skipped(name, module, reason))
                continue
        elif not filter_fn(module, name):
            if is_linear(module):
                skipped.append(Skipped(name, module, "not selected by filter_fn"))
            continue
        elif reason and not _may_be_forced(module):
            raise ValueError(f"quantize_: {_label(name)} cannot be quantized: {reason}")
        if embeddings and (reason := embedding_reason(module)):
            raise ValueError(f"quantize_: {_label(name)} cannot be quantized: {reason}")
        check_module(name, module, device, embeddings=embeddings)
        taken.append((name, module))
    if strict and (not taken or (filter_fn is None and skipped)):
        lines = folded(skipped, attrgetter("reason"), lambda item: _label(item.name))
        left = "; ".join(f"{name}: {items[0].reason}" for name, items in lines) or "the model has no nn.Linear"
        raise ValueError(f"quantize_: strict=True and not every linear layer can be quantized: {left}")
    configs = dict.fromkeys(map(id, heads), head)
    return _with_specs(model, [(name, module, configs.get(id(module), config)) for name, module in taken]), skipped


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
    """Why a linear layer is not safe to take, or an empty string."""
    if not is_linear(module) or isinstance(module, QuantLinear) or is_trained(module):
        return ""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight directly"
    if type(module) is not nn.Linear and not is_conv1d(module):
        return f"{type(module).__name__} is a subclass of nn.Linear, whose users may read its weight"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed from other parameters (weight_norm, pruning)"
    if not all(features_of(module)):
        return "its weight is empty"
    return ""


def _may_be_forced(module: nn.Module) -> bool:
    """Whether an explicit filter may take this layer in spite of the reason: a subclass that
    computes like nn.Linear."""
    return (
        isinstance(module, nn.Linear)
        and type(module) not in (nn.Linear, NonDynamicallyQuantizableLinear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and bool(module.in_features and module.out_features)
    )


def embedding_reason(module: nn.Module) -> str:
    """Why an embedding cannot be quantized, or an empty string, also for a module that is no embedding."""
    if not is_embedding(module):
        return ""
    known = type(module) in (nn.Embedding, QuantEmbedding) or is_scaled_embedding(module) or is_fake_quantized(module)
    if not known:
        return f"{type(module).__name__} is a subclass of nn.Embedding"
    if module.max_norm is not None:
        return f"max_norm={module.max_norm} changes its weight in every call"
    return "" if module.weight.numel() else "its weight is empty"


def check_module(name: str, module: nn.Module, device: torch.device | None, *, embeddings: bool = False) -> None:
    if isinstance(module, (QuantLinear, QuantEmbedding)):
        raise ValueError(
            f"quantize_: {_label(name)} is already quantized as {module.spec.name}; "
            "select others with filter_fn, or go back with lowbit.dequantize_(model)"
        )
    if is_trained(module):
        raise ValueError(
            f"quantize_: {_label(name)} is being trained as {module.trained_as}; "
            f"select others with filter_fn, or end it with lowbit.training.{module.end}"
        )
    if not is_linear(module) and not (embeddings and is_embedding(module)):
        wanted = "nn.Linear and nn.Embedding" if embeddings else "nn.Linear"
        raise TypeError(
            f"quantize_: filter_fn must select {wanted} layers only, got {_label(name)}: {type(module).__name__}; "
            "it is asked about every module: begin it with `isinstance(module, torch.nn.Linear) and`"
        )
    weight = module._parameters["weight"]
    if type(weight) is not nn.Parameter:
        raise TypeError(
            f"quantize_: weight of {_label(name)} must be a plain nn.Parameter, got {type(weight).__name__}"
        )
    if weight.dtype not in FLOATS:
        raise TypeError(f"quantize_: weight of {_label(name)} must be float32, bfloat16 or float16, got {weight.dtype}")
    wanted = features_of(module)
    if tuple(matrix_of(module, weight).shape) != wanted:
        wanted = list(reversed(wanted) if is_conv1d(module) else wanted)
        raise ValueError(f"quantize_: weight of {_label(name)} must have shape {wanted}, got {list(weight.shape)}")
    bias = getattr(module, "bias", None)
    if bias is not None and bias.dtype not in FLOATS:
        raise TypeError(f"quantize_: bias of {_label(name)} must be float32, bfloat16 or float16, got {bias.dtype}")
    there = weight.device
    served = devices.has_kernels(there) or (is_linear(module) and devices.places.has_rows("linear", there))
    if not served and there.type != "meta" and device is None:
        raise ValueError(
            f'quantize_: weight of {_label(name)} must be on the cpu, got device={weight.device}; device="cpu" moves it'
        )


def _with_specs(model: nn.Module, taken: list[tuple[str, nn.Module, FormatConfig]]) -> list[Selected]:
    modules = {id(module) for _, module, _ in taken}
    owners: dict[int, list[str]] = defaultdict(list)  # of weights that stay float
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not (id(module) in modules and key == "weight"):
                owners[id(parameter)].append(f"{prefix}.{key}" if prefix else key)
    selected, finite = [], set()
    for name, module, config in taken:
        weight = module.weight
        spec = config.spec(weight.dtype)
        if is_embedding(module):
            if spec.format == SEMI_SPARSE:
                raise ValueError(
                    f"quantize_: the embedding {_label(name)} cannot be 2:4: it is looked up, not multiplied"
                )
            if isinstance(spec.algorithm, GPTQ):
                raise ValueError(f"quantize_: GPTQ needs inputs, which the embedding {_label(name)} does not have")
            spec = replace(spec, x_format="float")
        if id(weight) not in finite:
            _check_values(name, weight, spec)
            if reason := config.refuses(matrix_of(module, weight.detach())):
                raise ValueError(f"quantize_: weight of {_label(name)} {reason}")
            finite.add(id(weight))
        kernel = serving_kernel(spec, *features_of(module), weight, embedding=is_embedding(module))
        others = owners[id(weight)]
        note = f"untied from {', '.join(others)}, which stays float" if others else ""
        selected.append(Selected(name, module, spec, kernel, note))
    return selected


def _check_values(name: str, weight: torch.Tensor, spec: LinearSpec) -> None:
    if weight.device.type == "meta":
        return
    if not all_finite(weight):
        raise ValueError(f"quantize_: weight of {_label(name)} must be finite, got inf or nan")
    if not spec.is_float:
        return
    most = torch.finfo(next(dtype for dtype, name in FLOAT_FORMATS.items() if name == spec.format)).max
    if most < torch.finfo(weight.dtype).max:
        largest = max(abs(float(value)) for value in torch.aminmax(weight.detach()))
        if largest > most:
            raise ValueError(
                f"quantize_: weight of {_label(name)} must be within +-{most:g} for {spec.format}, got {largest:g}"
            )


def calibration_of(model: nn.Module, given: Any, config: FormatConfig, selected: list[Selected]) -> Calibration | None:
    """Return the calibration that was given, or that of the given batches; raise unless the configuration can use it
    and it has seen every layer."""
    selected = [item for item in selected if is_linear(item.module)]  # inputs of an embedding do not weigh errors
    real = [item for item in selected if item.module.weight.device.type != "meta"]
    gptq = any(isinstance(item.spec.algorithm, GPTQ) for item in real)
    if given is None:
        if gptq:
            raise ValueError("quantize_: GPTQ needs calibration=batches, or of lowbit.calibrate(..., hessian=True)")
        return None
    if isinstance(given, (torch.Tensor, Mapping, str)) or not isinstance(given, (Calibration, Iterable)):
        raise TypeError(
            "quantize_: calibration must be of lowbit.calibrate, or an iterable of batches that the model is run on, "
            f"got {type(given).__name__}; [x] is one"
        )
    if selected and all(item.spec.takes_absmax or item.spec.algorithm is not None for item in selected) and not gptq:
        raise ValueError(f"quantize_: calibration is for scales that are searched for and for GPTQ, got {config}")
    if isinstance(given, Calibration):
        calibration = given
    else:
        names = {item.name for item in selected}
        calibration = calibrate(model, given, hessian=gptq, filter_fn=lambda module, name: name in names)
    unseen = [_label(item.name) for item in selected if item.name not in calibration.layers]
    if unseen:
        raise ValueError(f"quantize_: calibration must have seen every layer, got none of {told(unseen)}")
    for item in selected:
        inputs, k = calibration.layers[item.name], features_of(item.module)[1]
        if len(inputs.squares) != k:
            got = len(inputs.squares)
            raise ValueError(f"quantize_: calibration of {_label(item.name)} must be of k={k}, got {got}")
        if not (inputs.squares.isfinite() & (inputs.squares >= 0)).all():
            raise ValueError(
                f"quantize_: calibration of {_label(item.name)} must be of squares that are finite and not negative, "
                f"got {float(inputs.squares.min())} to {float(inputs.squares.max())}"
            )
        if gptq and inputs.products is None:
            raise ValueError("quantize_: GPTQ needs lowbit.calibrate(..., hessian=True), got one without")
    return calibration


def inputs_of(group: list[Selected], calibration: Calibration | None) -> InputMoments | None:
    """The inputs of the layers that share a weight, together, where their codes depend on them."""
    if calibration is None or group[0].spec.takes_absmax:
        return None
    inputs = [calibration.layers[item.name] for item in group if is_linear(item.module)]
    return functools.reduce(operator.add, inputs) if inputs else None


def serving_kernel(spec: LinearSpec, n: int, k: int, weight: torch.Tensor, *, embedding: bool = False) -> str:
    """Name the row that will serve activations of the weight's dtype; both where one token takes another row."""
    names = []
    dtype = str(weight.dtype).removeprefix("torch.")
    device = devices.places.type_of_rows(weight.device, "dequantize" if embedding else "linear")
    if embedding:
        rows = [row for row in _C.kernels("dequantize") if row["available"] and row["device"] == device]
        return next(row["name"] for row in rows if row["name"].startswith("dequantize_rows_"))
    for m in (1, 64):
        names.append(_C.select_linear(m, *spec.op_args(n, k), dtype, device))
    return names[0] if names[0] == names[1] else f"{names[0]} (m=1), {names[1]}"


def _label(name: str) -> str:
    return name or "the model itself"
