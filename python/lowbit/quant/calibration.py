# SPDX-License-Identifier: Apache-2.0
"""calibrate: moments of the inputs of a model's linear layers and experts, which weigh the errors of their weights."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.documents.whole_file import replaced_file
from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.quant.evaluation import arguments_of, evaluating
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.kinds import LayerWeight, kind_of
from lowbit.quant.load_check import without_encoder_fast_path
from lowbit.quant.packing import Selected
from lowbit.quant.read_state import unpickled
from lowbit.tables.folding import told

VERSION = 1
PROGRESS_AFTER_S = 2.0
FEW_ROWS = 32
"""Average rows of the whole layer that are added to those of each expert."""

Moments = dict[LayerWeight, list[InputMoments]]
"""Of one layer: those of each matrix of its weights."""


@dataclass(slots=True)
class Calibration:
    """The result of ``calibrate``, for ``quantize_(model, config, calibration=...)``.

    Args:
        layers: moments by the qualified name of each linear layer that was called.
        uncalled: names of layers that were not.
        experts: moments of each expert, by the name of the weight, of the modules of experts that were called.
    """

    layers: dict[str, InputMoments] = field(default_factory=dict)
    uncalled: tuple[str, ...] = ()
    experts: dict[str, list[InputMoments]] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which holds tensors and plain values alone."""
        layers = {name: layer.stored for name, layer in self.layers.items()}
        experts = {name: [expert.stored for expert in each] for name, each in self.experts.items()}
        held = {"lowbit_calibration": VERSION, "layers": layers, "uncalled": list(self.uncalled), "experts": experts}
        with replaced_file(path) as place:
            torch.save(held, place)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a file that ``save`` wrote.

        Raises:
            ValueError: it is another file, or of a version that is not here.
        """
        wanted = f"Calibration.load: {path} must be a calibration of version {VERSION}"
        held = unpickled(path, wanted)
        version = held.get("lowbit_calibration") if isinstance(held, dict) else None
        if version != VERSION:
            raise ValueError(f"{wanted}, got {version}")
        layers = {name: InputMoments(*layer) for name, layer in held["layers"].items()}
        experts = {name: [InputMoments(*one) for one in each] for name, each in held.get("experts", {}).items()}
        return cls(layers, tuple(held["uncalled"]), experts)

    def __repr__(self) -> str:
        rows = [layer.rows for layer in self.layers.values()]
        seen = f"{len(rows)} layers, {min(rows)} to {max(rows)} rows" if rows else "no layers"
        hessian = ", with hessians" if any(layer.products is not None for layer in self.layers.values()) else ""
        missed = f", {len(self.uncalled)} never called" if self.uncalled else ""
        of_experts = [expert.rows for each in self.experts.values() for expert in each]
        if of_experts:
            seen += f", experts of {len(self.experts)} weights, {min(of_experts)} to {max(of_experts)} rows"
        return f"Calibration({seen}{hessian}{missed})"


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    hessian: bool = False,
) -> Calibration:
    """Run ``model`` on ``batches`` and return the moments of the inputs of its linear layers, and of each expert.

    The model runs in evaluation mode without gradients, and is as it was afterwards. A few dozen inputs like those of
    use are enough.

    Args:
        model: a float model; layers that are already quantized are counted too.
        batches: an iterable of inputs: a tensor is the one argument, a tuple or list the positional ones, a mapping
            the keyword ones.
        filter_fn: called with (module, qualified name) of each linear layer and module of experts, True counts it; None
            counts all.
        hessian: keep the mean of x x^T of linear layers too, which `GPTQ` needs: 4 k^2 bytes per layer.

    Returns:
        A Calibration, which `quantize_` takes.

    Raises:
        TypeError: model is no module, or batches is one input and no iterable of inputs.
        ValueError: there was no batch, the model fails on one (names the batch and its type), or no linear layer was
            called; a layer was given inf or nan (says which).

    Example:
        >>> calibration = lowbit.calibrate(model, batches)
        >>> lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32), calibration=calibration)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"calibrate: model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(f"calibrate: batches must be an iterable of inputs, got {type(batches).__name__}; [x] is one")
    moments: dict[str, Moments] = {}
    handles = []
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and kind.multiplies and (filter_fn is None or filter_fn(module, name)):
            moments[name] = {
                weight: [InputMoments.zero(weight.k, hessian and kind.has_products) for _ in range(weight.experts or 1)]
                for weight in kind.weights(module)
            }
            handles.append(module.register_forward_pre_hook(_counting(moments[name]), with_kwargs=True))
    count = 0
    try:
        with evaluating(model), without_encoder_fast_path(model):  # which would pass the layers by
            for batch in _progress(batches):
                _run(model, batch, count)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
    calibration = Calibration()
    for name, of_layer in moments.items():
        for weight, each in of_layer.items():
            if not any(one.rows for one in each):
                calibration.uncalled += (name,) if name not in calibration.uncalled else ()
            elif weight.experts is None:
                calibration.layers[name] = each[0]
            else:
                calibration.experts[f"{name}.{weight.key}" if name else weight.key] = each
    if not calibration.layers and not calibration.experts:
        raise ValueError(
            f"calibrate: a linear layer must be called, got {count} batches and none of {len(moments)} was"
        )
    for name, each in [*((name, [layer]) for name, layer in calibration.layers.items()), *calibration.experts.items()]:
        if not all(one.importance.isfinite().all() for one in each):
            raise ValueError(f"calibrate: inputs of {_label(name)} must be finite, got inf or nan")
    return calibration


def _run(model: nn.Module, batch: Any, number: int) -> None:
    args, kwargs = arguments_of(batch)
    try:
        model(*args, **kwargs)
    except Exception as error:  # the model is the caller's, and may raise anything
        told = [*map(_told, args), *(f"{name}={_told(value)}" for name, value in kwargs.items())]
        raise ValueError(
            f"calibrate: the model must run on each batch, got {type(error).__name__} on batch {number}, which is "
            f"model({', '.join(told)}): {error}"
        ) from error


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _counting(moments: Moments) -> Callable[..., None]:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for weight, number, rows in kind_of(module).inputs(module, args, kwargs):
            of_matrix = moments[weight][number]
            of_matrix.add(rows.to(of_matrix.squares.device))

    return count


def _progress(batches: Iterable[Any]) -> Iterable[Any]:
    """A bar once it takes long, where tqdm is there."""
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError:
        return batches
    return tqdm(batches, desc="calibrate", unit="batch", delay=PROGRESS_AFTER_S)


def calibration_of(model: nn.Module, given: Any, config: FormatConfig, selected: list[Selected]) -> Calibration:
    """Return the calibration that was given, or that of the given batches; raise unless the configuration can use it
    and it has seen every layer."""
    selected = [item for item in selected if kind_of(item.module).multiplies]  # no inputs are counted for tables
    real = [item for item in selected if not item.value.is_meta]
    gptq = any(isinstance(item.spec.algorithm, GPTQ) for item in real)
    if isinstance(given, (Tensor, Mapping, str)) or not isinstance(given, (Calibration, Iterable)):
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
    seen = calibration.layers.keys() | calibration.experts.keys()
    unseen = [_label(item.row_name) for item in selected if item.row_name not in seen]
    if unseen:
        raise ValueError(f"quantize_: calibration must have seen every layer, got none of {told(unseen)}")
    for item in selected:
        _check_moments(item, _moments_of(item, calibration), gptq)
    return calibration


def _moments_of(item: Selected, calibration: Calibration) -> list[InputMoments]:
    """Those of each matrix of a weight."""
    if item.weight.experts is None:
        return [calibration.layers[item.row_name]]
    return calibration.experts[item.row_name]


def _check_moments(item: Selected, moments: list[InputMoments], gptq: bool) -> None:
    label, k, count = _label(item.row_name), item.weight.k, item.weight.experts or 1
    if len(moments) != count:
        raise ValueError(f"quantize_: calibration of {label} must be of {count} experts, got {len(moments)}")
    for inputs in moments:
        if len(inputs.squares) != k:
            raise ValueError(f"quantize_: calibration of {label} must be of k={k}, got {len(inputs.squares)}")
        if not (inputs.squares.isfinite() & (inputs.squares >= 0)).all():
            raise ValueError(
                f"quantize_: calibration of {label} must be of squares that are finite and not negative, "
                f"got {float(inputs.squares.min())} to {float(inputs.squares.max())}"
            )
        if gptq and inputs.products is None:
            raise ValueError("quantize_: GPTQ needs lowbit.calibrate(..., hessian=True), got one without")


def inputs_of(group: list[Selected], calibration: Calibration) -> InputMoments | list[InputMoments] | None:
    """The inputs of the layers that share a weight, together, where their codes depend on them: of each expert with
    some of the whole layer, since many have few tokens."""
    if group[0].spec.takes_absmax:
        return None
    counted = [_moments_of(item, calibration) for item in group if kind_of(item.module).multiplies]
    if not counted:
        return None
    each = [functools.reduce(operator.add, of_matrix) for of_matrix in zip(*counted, strict=True)]
    if group[0].weight.experts is None:
        return each[0]
    of_layer = functools.reduce(operator.add, each)
    return [expert.blended(of_layer, FEW_ROWS) for expert in each]


def _label(name: str) -> str:
    return name or "the model itself"
