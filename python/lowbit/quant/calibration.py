# SPDX-License-Identifier: Apache-2.0
"""calibrate: moments of the inputs of a model's linear layers, which weigh the errors of their weights."""

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
from lowbit.quant.kinds import features_of, kind_of
from lowbit.quant.load_check import without_encoder_fast_path
from lowbit.quant.packing import Selected
from lowbit.quant.quant_linear import LINEAR
from lowbit.quant.read_state import unpickled
from lowbit.tables.folding import told

VERSION = 1
PROGRESS_AFTER_S = 2.0


@dataclass(slots=True)
class Calibration:
    """The result of ``calibrate``, for ``quantize_(model, config, calibration=...)``.

    Args:
        layers: moments by the qualified name of each linear layer that was called.
        uncalled: names of those that were not.
    """

    layers: dict[str, InputMoments] = field(default_factory=dict)
    uncalled: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which holds tensors and plain values alone."""
        layers = {name: (layer.rows, layer.squares, layer.products) for name, layer in self.layers.items()}
        held = {"lowbit_calibration": VERSION, "layers": layers, "uncalled": list(self.uncalled)}
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
        return cls({name: InputMoments(*layer) for name, layer in held["layers"].items()}, tuple(held["uncalled"]))

    def __repr__(self) -> str:
        rows = [layer.rows for layer in self.layers.values()]
        seen = f"{len(rows)} layers, {min(rows)} to {max(rows)} rows" if rows else "no layers"
        hessian = ", with hessians" if any(layer.products is not None for layer in self.layers.values()) else ""
        missed = f", {len(self.uncalled)} never called" if self.uncalled else ""
        return f"Calibration({seen}{hessian}{missed})"


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    hessian: bool = False,
) -> Calibration:
    """Run ``model`` on ``batches`` and return the moments of its linear layers' inputs.

    The model runs in evaluation mode without gradients, and is as it was afterwards. A few dozen inputs like those of
    use are enough.

    Args:
        model: in float; layers that are quantized are counted too.
        batches: an iterable of inputs: a tensor is the one argument, a tuple or list the positional ones, a mapping
            the keyword ones.
        filter_fn: called with (module, qualified name) of each linear layer, True counts it; None counts all.
        hessian: keep the mean of x x^T too, which `GPTQ` needs: 4 k^2 bytes per layer.

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
    moments: dict[str, InputMoments] = {}
    handles = []
    for name, module in model.named_modules():
        if kind_of(module) is LINEAR and (filter_fn is None or filter_fn(module, name)):
            k = features_of(module)[1]
            moments[name] = InputMoments.zero(k, hessian)
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
    called = {name: layer for name, layer in moments.items() if layer.rows}
    if not called:
        raise ValueError(
            f"calibrate: a linear layer must be called, got {count} batches and none of {len(moments)} was"
        )
    for name, layer in called.items():
        if not layer.importance.isfinite().all():
            raise ValueError(f"calibrate: inputs of {name or 'the model itself'} must be finite, got inf or nan")
    return Calibration(called, tuple(name for name in moments if name not in called))


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


def _counting(moments: InputMoments) -> Callable[..., None]:
    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if x.dim() and x.shape[-1] == len(moments.squares):  # else the layer itself raises the error
            moments.add(x.to(moments.squares.device))

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
    selected = [item for item in selected if kind_of(item.module) is LINEAR]  # no inputs are counted for other kinds
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
    unseen = [_label(item.name) for item in selected if item.name not in calibration.layers]
    if unseen:
        raise ValueError(f"quantize_: calibration must have seen every layer, got none of {told(unseen)}")
    for item in selected:
        inputs, k = calibration.layers[item.name], item.weight.k
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


def inputs_of(group: list[Selected], calibration: Calibration) -> InputMoments | None:
    """The inputs of the layers that share a weight, together, where their codes depend on them."""
    if group[0].spec.takes_absmax:
        return None
    inputs = [calibration.layers[item.name] for item in group if kind_of(item.module) is LINEAR]
    return functools.reduce(operator.add, inputs) if inputs else None


def _label(name: str) -> str:
    return name or "the model itself"
