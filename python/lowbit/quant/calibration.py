# SPDX-License-Identifier: Apache-2.0
"""calibrate: second moments of the inputs of linear layers and experts, used to weight the errors of their weights."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.documents.whole_file import replaced_file
from lowbit.formats.algorithms import GPTQ
from lowbit.quant.calibration_cost import tell_cost, tell_moments
from lowbit.quant.evaluation import arguments_of, evaluating, without_encoder_fast_path
from lowbit.quant.fused import unfuse
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.kinds import kind_of, weights_of
from lowbit.quant.own_text import body_of, is_own_text, own_text, writer_of
from lowbit.quant.packing import Selected
from lowbit.quant.read_state import unpickled
from lowbit.quant.shared_inputs import SharedInputs
from lowbit.quant.text_batches import batches_of
from lowbit.tables.folding import told

VERSION = 1
PROGRESS_AFTER_S = 2.0
FEW_ROWS = 32
"""Number of average rows of the whole layer that are added to the moments of each expert."""


class BlendedMoments(Sequence[InputMoments]):
    """The moments of each expert of a weight, with ``FEW_ROWS`` average rows of the whole layer, since many experts see
    few tokens or none. One is made at a time: x x^T of all experts takes 4 k^2 bytes times their number.

    Args:
        each: the moments of the experts' own rows.
    """

    def __init__(self, each: Sequence[InputMoments]) -> None:
        self._each, self._of_layer = each, InputMoments.total(each)

    def __len__(self) -> int:
        return len(self._each)

    def __getitem__(self, expert: Any) -> Any:
        return self._each[expert].blended(self._of_layer, FEW_ROWS)


@dataclass(slots=True)
class Calibration:
    """The result of ``calibrate``, for ``quantize_(model, config, calibration=...)``.

    Args:
        layers: the moments of each linear layer that was called, by its qualified name.
        uncalled: names of the layers that were not called.
        experts: for each weight of a module of experts that was called, the moments of each expert, by the qualified
            name of the weight.
    """

    layers: dict[str, InputMoments] = field(default_factory=dict)
    uncalled: tuple[str, ...] = ()
    experts: dict[str, list[InputMoments]] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration to a file, as tensors and plain values only."""
        layers = {name: layer.stored for name, layer in self.layers.items()}
        experts = {name: [expert.stored_rows for expert in each] for name, each in self.experts.items()}
        held = {"lowbit_calibration": VERSION, "layers": layers, "uncalled": list(self.uncalled), "experts": experts}
        with replaced_file(path) as file:
            torch.save(held, file)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration that ``save`` wrote.

        Raises:
            ValueError: the file is not a calibration, or its version is not supported.
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
        each = [*self.layers.values(), *(expert for each in self.experts.values() for expert in each)]
        hessian = ", with hessians" if any(one.has_products for one in each) else ""
        missed = f", {len(self.uncalled)} never called" if self.uncalled else ""
        of_experts = [expert.rows for each in self.experts.values() for expert in each]
        if of_experts:
            seen += f", experts of {len(self.experts)} weights, {min(of_experts)} to {max(of_experts)} rows"
        return f"Calibration({seen}{hessian}{missed})"


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any] | str,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    hessian: bool = False,
    tokenizer: Callable[..., Any] | None = None,
) -> Calibration:
    """Run ``model`` on ``batches`` and return the second moments of the inputs of its linear layers and experts.

    The model runs in evaluation mode without gradients; afterwards each module has its previous mode. A few dozen
    representative inputs are enough.

    Args:
        model: a float model; linear layers that are already quantized are included.
        batches: an iterable of inputs: a list, a DataLoader, rows of a dataset. A tensor is passed to the model as its
            only argument, a tuple or list as positional arguments, a mapping as keyword arguments. With ``tokenizer``,
            an input may be text: a string, a list of strings, or a mapping with such an entry "text"; long text is cut
            into windows of 512 tokens. "self" lets a language model write its own text, and gives an encoder random
            words: 16 texts of 192 tokens, the same in each call.
        filter_fn: called with (module, qualified name) of each linear layer and module of experts; True includes it.
            None includes all.
        hessian: also accumulate x x^T, which `GPTQ` needs. It takes 4 k^2 bytes per layer, or less while there are
            fewer than k rows; layers that are called with the same tensor share them. For experts it takes as much for
            each, but up to k rows of an expert are kept instead: x of each token once, and what the expert makes of it.
            More than 2 GB are told after the first batch, if the number of batches is known.
        tokenizer: a tokenizer of transformers, for batches of text.

    Returns:
        A Calibration for `quantize_`.

    Raises:
        TypeError: model is not a module, or batches is a single input instead of an iterable of inputs.
        ValueError: batches is empty, or text without a tokenizer; it is "self", and the model needs data (vision,
            speech, encoder with decoder); the model raises on a batch (the message names the batch and its type); no linear
            layer was called; or a layer received inf or nan (the message names the layer).

    Example:
        >>> calibration = lowbit.calibrate(model, batches)
        >>> lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32), calibration=calibration)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"calibrate: model must be a torch.nn.Module, got {type(model).__name__}")
    writer, own = model, is_own_text(batches)
    if own:
        writer = writer_of(model)
        batches = own_text(writer)
        if writer is not model:
            unfuse(writer)
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(f"calibrate: batches must be an iterable of inputs, got {type(batches).__name__}; [x] is one")
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and kind.multiplies and (filter_fn is None or filter_fn(module, name)):
            layers[name] = module
    # The copy that wrote the text runs on it too, several times as fast; but packed experts do not tell their inputs.
    runs = writer if all(kind_of(module).tells_inputs_packed for module in layers.values()) else model
    seen = SharedInputs()
    handles = []
    for name in layers:
        count = counting(seen, name, hessian)
        handles.append(runs.get_submodule(name).register_forward_pre_hook(count, with_kwargs=True))
    if own:
        runs = body_of(runs, layers)
    count = 0
    try:
        with evaluating(runs), without_encoder_fast_path(runs):  # the fast path would not call the layers
            for batch in _progress(batches_of(batches, tokenizer)):
                _run(runs, batch, count)
                seen.finish_call()
                count += 1
                if count == 1 and hessian and isinstance(batches, Sized):
                    tell_moments(seen.sums.values(), len(batches))
    finally:
        for handle in handles:
            handle.remove()
    calibration = collected(seen, layers)
    if not calibration.layers and not calibration.experts:
        raise ValueError(
            f"calibrate: batches must reach a linear layer, got {count} batches that called none of {len(layers)}"
        )
    return calibration


def collected(seen: SharedInputs, layers: Mapping[str, nn.Module]) -> Calibration:
    """Return what was counted of the inputs of these layers.

    Raises:
        ValueError: a layer received inf or nan; the message names it.
    """
    moments = seen.moments()
    calibration = Calibration()
    for name, module in layers.items():
        for weight in weights_of(module):
            each = [moments.get((name, weight.key, number)) for number in range(weight.experts or 1)]
            if not any(one is not None and one.rows for one in each):
                calibration.uncalled += (name,) if name not in calibration.uncalled else ()
            elif weight.experts is None:
                calibration.layers[name] = each[0]
            else:
                products = any(one is not None and one.has_products for one in each)
                unused = [one or InputMoments.zero(weight.k, products) for one in each]
                calibration.experts[f"{name}.{weight.key}" if name else weight.key] = unused
    for name, each in [*((name, [layer]) for name, layer in calibration.layers.items()), *calibration.experts.items()]:
        if not all(one.importance.isfinite().all() for one in each):
            raise ValueError(f"calibrate: inputs of {_label(name)} must be finite, got inf or nan")
    return calibration


def _run(model: nn.Module, batch: Any, number: int) -> None:
    args, kwargs = arguments_of(batch)
    try:
        model(*args, **kwargs)
    except Exception as error:  # the model is the caller's and may raise anything
        told = [*map(_told, args), *(f"{name}={_told(value)}" for name, value in kwargs.items())]
        raise ValueError(
            f"calibrate: the model must run on each batch, got {type(error).__name__} on batch {number}, which is "
            f"model({', '.join(told)}): {error}"
        ) from error


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def counting(seen: SharedInputs, name: str, products: bool) -> Callable[..., None]:
    """Return a forward pre-hook that counts the inputs of a layer of this name, with x x^T if ``products`` is True."""

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for weight, number, rows, picked in kind_of(module).inputs(module, args, kwargs):
            seen.add((name, weight.key, number), weight.k, products, rows, picked)

    return count


def _progress(batches: Iterable[Any]) -> Iterable[Any]:
    """Show a progress bar if the loop takes longer than ``PROGRESS_AFTER_S`` and tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError:
        return batches
    return tqdm(batches, desc="calibrate", unit="batch", delay=PROGRESS_AFTER_S)


def calibration_of(
    model: nn.Module, given: Any, config: Any, selected: list[Selected], tokenizer: Any = None
) -> Calibration:
    """Return the given calibration, or the one for the given batches, of which text goes through the tokenizer.

    Raises unless the configuration can use a calibration and it covers every selected layer.
    """
    multiplied = [item for item in selected if kind_of(item.module).multiplies]
    selected = [item for item in multiplied if item.spec.weighs_inputs]
    real = [item for item in selected if not item.value.is_meta]
    gptq = any(isinstance(item.spec.algorithm, GPTQ) for item in real)
    own = is_own_text(given)
    if not own and (isinstance(given, (Tensor, Mapping, str)) or not isinstance(given, (Calibration, Iterable))):
        raise TypeError(
            "quantize_: calibration must be a result of lowbit.calibrate, an iterable of batches to run the model on, "
            f"or 'self', got {type(given).__name__}; [x] is one batch"
        )
    if multiplied and not selected:
        raise ValueError(
            f"quantize_: calibration must be None for formats that neither search for scales nor use GPTQ, got {config}"
        )
    if isinstance(given, Calibration):
        calibration = given
    else:
        names = {item.name for item in selected}
        if own:
            tell_cost([item for item in multiplied if not item.value.is_meta])
        only = lambda module, name: name in names  # noqa: E731
        calibration = calibrate(model, given, hessian=gptq, filter_fn=only, tokenizer=tokenizer)
    seen = calibration.layers.keys() | calibration.experts.keys()
    unseen = [_label(item.row_name) for item in selected if item.row_name not in seen]
    if unseen:
        raise ValueError(f"quantize_: calibration must have inputs of every layer, got none of {told(unseen)}")
    for item in selected:
        by_gptq = isinstance(item.spec.algorithm, GPTQ) and not item.value.is_meta
        _check_moments(item, _moments_of(item, calibration), by_gptq)
    return calibration


def _moments_of(item: Selected, calibration: Calibration) -> list[InputMoments]:
    """Return the moments for each matrix of a weight."""
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
        if gptq and not inputs.has_products:
            raise ValueError("quantize_: GPTQ needs lowbit.calibrate(..., hessian=True), got one without")
        if gptq and not inputs.products_are_finite:
            raise ValueError(f"quantize_: calibration of {label} must be of finite products, got inf or nan")


def inputs_of(group: list[Selected], calibration: Calibration) -> InputMoments | Sequence[InputMoments] | None:
    """Return the summed moments of the layers that share a weight, or None if its codes do not depend on the inputs.
    For experts there is one item each."""
    if not group[0].spec.weighs_inputs:
        return None
    counted = [_moments_of(item, calibration) for item in group if kind_of(item.module).multiplies]
    if not counted:
        return None
    each = [functools.reduce(operator.add, of_matrix) for of_matrix in zip(*counted, strict=True)]
    if group[0].weight.experts is None:
        return each[0]
    return BlendedMoments(each)


def without_inputs(item: Selected, calibration: Calibration) -> str:
    """Return a remark for the report on the experts that saw no token, or an empty string."""
    if item.weight.experts is None:
        return ""
    unseen = sum(not one.rows for one in calibration.experts[item.row_name])
    return f"{unseen} of {item.weight.experts} experts saw no token and took the inputs of all" if unseen else ""


def _label(name: str) -> str:
    return name or "the model itself"
