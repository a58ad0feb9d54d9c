# SPDX-License-Identifier: Apache-2.0
"""lowbit.smooth_: move channel scales from a decoder's activations into its weights, before it is quantized.

Each channel of the input x of a linear layer is divided by a scale s, and the matching column of the weight is
multiplied by it. The module before it then produces x / s: the norm (through its gains), the value projection (before
o_proj) or the up projection (before down_proj). The squared error of a column counts 1 / s^2 as much. The scale of its
quantization group grows by less than s if other channels of the group are smaller, so columns with large inputs become
more precise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats.base import FormatConfig
from lowbit.formats.int4 import int8_dynamic_activation_int4_weight
from lowbit.models.decoder_pieces import Half, decoder_of
from lowbit.models.folded_weights import Changes, make_checked
from lowbit.quant.calibration import Calibration, calibrate
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.packing import pack_weight
from lowbit.quant.quantize import config_asked_for
from lowbit.quant.report import decibel
from lowbit.tables.folding import folded

STEPS = 20
"""Steps of the search for alpha, as in AWQ."""
RANK = 32
_ITERATIONS = 5
"""The number of products with the matrix, as in torch.svd_lowrank."""
_LEAST = 1e-8  # fraction of the mean of x^2 that is added, so that a channel of zeros has a finite scale


@dataclass(frozen=True, slots=True)
class SmoothedRow:
    """The linear layers that read one input.

    Attributes:
        layer: the name of the first of them.
        alpha: the exponent in s = rms(x)^alpha; 0 leaves the layers as they are.
        gained_db: the reduction of the output error in the given format, in dB.
    """

    layer: str
    alpha: float
    gained_db: float


@dataclass(frozen=True, slots=True)
class SmoothingReport:
    """The report of `smooth_`: a `SmoothedRow` for each input, and ``difference`` as in `RotationReport`."""

    rows: list[SmoothedRow]
    difference: float

    def __repr__(self) -> str:
        lines = []
        for name, rows in folded(self.rows, lambda row: None):
            alphas = [row.alpha for row in rows]
            gained = sum(row.gained_db for row in rows) / len(rows)
            lines.append(f"{name}: alpha {min(alphas):.2f} to {max(alphas):.2f}, error {gained:.2f} dB smaller")
        return "\n".join([*lines, f"logits differ by {self.difference:.1e}"])


def smooth_(
    model: nn.Module, calibration: Calibration | Iterable[Any], config: FormatConfig | Any | None = None
) -> SmoothingReport:
    """Move channel scales of a transformers language model from activations into weights, in place.

    The model's results stay the same. For each input of linear layers, the scales are s = rms(x)^alpha, with the alpha
    from 0 to 1 that minimizes the output error when the weights are quantized. (AWQ, Lin et al. 2023, arXiv:2306.00978;
    here errors are weighted by the mean of x x^T.) Call it before `quantize_` with a calibration; it is not needed with
    GPTQ. After `rotate_`, which makes channels alike, there is little left to gain.

    The supported models and the checks are those of `rotate_`; the head does not change.

    Args:
        model: a float model on the CPU.
        calibration: inputs to run the model on, or a result of ``lowbit.calibrate`` with ``hessian=True``. A result
            without ``hessian=True`` has only the mean of x^2 of each channel, which may select scales that make the
            error larger.
        config: the format whose errors are compared. None means ``int8_dynamic_activation_int4_weight(group_size=32)``.

    Returns:
        A `SmoothingReport`; it prints one line per kind of layer.

    Raises:
        TypeError: ``config`` is not a configuration, or for the reasons of `rotate_` and `calibrate`.
        ValueError: the calibration does not include a layer, or for the reasons of `rotate_` and `calibrate`. Nothing
            was changed.

    Example:
        >>> config = lowbit.int4_weight_only(group_size=128)
        >>> lowbit.smooth_(model, batches, config)
        >>> lowbit.quantize_(model, config, calibration=batches)
    """
    config = int8_dynamic_activation_int4_weight(32) if config is None else config_asked_for("smooth_: config", config)
    decoder = decoder_of("smooth_", model)
    inputs = [of for half in decoder.halves for of in (_behind_norm(half), _in_front_of_writer(half))]
    seen = _seen(model, calibration, {decoder.names[id(of.layers[0])] for of in inputs})
    changes, rows = Changes(), []
    for of in inputs:
        name = decoder.names[id(of.layers[0])]
        alpha, gained_db, scales = _search(of, seen.layers[name], config)
        rows.append(SmoothedRow(name, alpha, gained_db))
        if alpha:
            of.move(scales, changes)
    return SmoothingReport(rows, make_checked("smooth_", model, decoder.words, changes))


@dataclass(frozen=True, slots=True)
class _Input:
    """An input of one or more linear layers.

    Args:
        layers: the layers that read it.
        heads: (n, d): n query heads of d channels share a value head, and so share scales; (1, channels) if nothing is
            shared.
        move: adds the changes that divide the input by scales ``[channels]``.
    """

    layers: tuple[nn.Linear, ...]
    heads: tuple[int, int]
    move: Callable[[Tensor, Changes], None]


def _behind_norm(half: Half) -> _Input:
    norm = half.norm

    def move(scales: Tensor, changes: Changes) -> None:
        changes.add(norm.module, "weight", lambda weight: (norm.offset + weight) / scales - norm.offset)
        for layer in norm.readers:
            changes.add(layer, "weight", lambda weight: weight * scales)

    return _Input(norm.readers, (1, norm.readers[0].in_features), move)


def _in_front_of_writer(half: Half) -> _Input:
    size = half.head_dim or half.inner_rows
    shared = half.writer.in_features // half.inner_rows

    def move(scales: Tensor, changes: Changes) -> None:
        own = scales.view(-1, shared, size)[:, 0].reshape(-1)  # one scale per value, shared by its query heads

        def divided(rows: Tensor) -> Tensor:
            return rows / own.view(-1, *[1] * (rows.dim() - 1))

        changes.add_to_last_rows(half.inner, half.inner_rows, divided)
        changes.add(half.writer, "weight", lambda weight: weight * scales)

    return _Input((half.writer,), (shared, size), move)


def _seen(model: nn.Module, calibration: Calibration | Iterable[Any], names: set[str]) -> Calibration:
    given = isinstance(calibration, Calibration)
    seen = calibration
    if not given:
        seen = calibrate(model, calibration, hessian=True, filter_fn=lambda module, name: name in names)
    for name in sorted(names):
        layer, k = seen.layers.get(name), model.get_submodule(name).in_features
        if layer is None or len(layer.squares) != k:
            got = "none" if layer is None else f"k={len(layer.squares)}"
            raise ValueError(f"smooth_: calibration must reach {name}, whose inputs have k={k}, got {got}")
    return seen


def _search(of: _Input, inputs: InputMoments, config: FormatConfig) -> tuple[float, float, Tensor]:
    """Return alpha, the reduction of the error relative to alpha = 0 in dB, and the scales, float64 ``[channels]``."""
    squares = inputs.importance.double()
    squares = squares.view(-1, *of.heads).mean(1, keepdim=True).expand(-1, *of.heads).reshape(-1)
    root = (squares + _LEAST * squares.mean()).sqrt()
    parts = _parts(inputs)
    best, error, before = (0.0, torch.ones_like(root)), math.inf, math.inf
    for step in range(STEPS + 1 if bool(root.any()) else 1):
        scales = (root.log() * (step / STEPS)).exp() if step else torch.ones_like(root)
        scales = scales / (scales.max() * scales.min()).sqrt()
        now = sum(_error(layer.weight, scales, inputs, parts, config) for layer in of.layers)
        before = before if step else now
        if now < error:
            best, error = (step / STEPS, scales), now
    return best[0], decibel(before, error), best[1]


def _parts(inputs: InputMoments) -> tuple[Tensor, Tensor]:
    """Return d and F, where diag(d) + F F^T approximates the mean of x x^T, and F ``[k, RANK]`` has its largest
    eigenvalues.

    In a language model, a few directions have most of the energy of x, and errors along them add up. If the calibration
    has no products, F is empty.
    """
    if not inputs.has_products:
        return inputs.importance, inputs.importance.new_zeros(len(inputs.squares), 0)
    hessian = inputs.hessian
    factor = _factor(hessian, min(RANK, len(hessian)))
    return (hessian.diagonal() - factor.square().sum(1)).clamp_min(0), factor


def _factor(hessian: Tensor, rank: int) -> Tensor:
    """Return F ``[k, rank]``, where F F^T approximates the largest eigenvalues of ``hessian [k, k]``.

    torch.svd_lowrank has the same iteration (Halko et al. 2009, arXiv:0909.4061), but draws its first vectors from the
    global generator, which all threads share.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    basis = torch.randn(len(hessian), rank, generator=generator, dtype=hessian.dtype, device="cpu")
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(hessian @ basis).Q
    values, vectors = torch.linalg.eigh(basis.T @ hessian @ basis)
    return basis @ vectors * values.clamp_min(0).sqrt()


def _error(
    weight: Tensor, scales: Tensor, inputs: InputMoments, parts: tuple[Tensor, Tensor], config: FormatConfig
) -> float:
    """Return the mean squared error of the outputs with the scaled weight quantized and its input divided by the
    scales."""
    spec = replace(config.spec(torch.float32), algorithm=None)
    scaled = (weight.detach().double() * scales).float()
    divided = InputMoments(inputs.rows, inputs.squares / scales.square())
    packed, _ = pack_weight(scaled, spec, None if spec.takes_absmax else divided)
    left = (scaled - torch.ops.lowbit.dequantize(packed, *spec.weight_args(*scaled.shape))) / scales.float()
    diagonal, factor = parts
    return float(left.square().sum(0, dtype=torch.float64) @ diagonal.double() + (left @ factor).square().sum())
