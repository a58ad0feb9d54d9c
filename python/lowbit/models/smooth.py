# SPDX-License-Identifier: Apache-2.0
"""lowbit.smooth_: scales of channels that a decoder's weights take over from its activations, before it is quantized.

A channel of the input x of a linear layer is divided by s and the column of its weight multiplied by it: the norm in
front (its gains), the values (in front of o_proj) or the up projection (in front of down_proj) now give x / s. The
error of a column counts as s^-2, while the scale of its group grows by less than s where other channels of the
group are smaller: columns that meet large inputs get more of the codes.
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
from lowbit.formats.torchao import from_torchao
from lowbit.models.decoder_pieces import Half, decoder_of
from lowbit.models.folded_weights import Changes, make_checked
from lowbit.quant.calibration import Calibration, calibrate
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.packing import pack_weight
from lowbit.quant.report import decibel
from lowbit.tables.folding import folded

STEPS = 20
"""Steps of the search for alpha, as in AWQ."""
RANK = 32
_ITERATIONS = 5
"""Products with the matrix, as many as torch.svd_lowrank makes."""
_LEAST = 1e-8  # fraction of the mean of x^2 that is added: a channel of zeros has a finite scale


@dataclass(frozen=True, slots=True)
class SmoothedRow:
    """The linear layers that read one input.

    Attributes:
        layer: name of the first of them.
        alpha: s is the root mean square of the input's channels to the power of this; 0 left them as they were.
        gained_db: the reduction of the outputs' error in the given format, in dB.
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
    """Move scales of channels of a language model of transformers from activations into weights, in place.

    The model computes the same results. For each input of linear layers the scales are s = rms(x)^alpha, with the alpha
    from 0 to 1 that makes the error of the outputs least when the weights are quantized. (AWQ, Lin et al. 2023,
    arXiv:2306.00978; errors are weighted by the mean of x x^T.) Call it before `quantize_` with a calibration; with
    GPTQ it is not needed. After `rotate_`, which makes channels alike, little is left to gain.

    Models, checks and refusals are those of `rotate_`; the head stays as it is.

    Args:
        model: a float model on the CPU.
        calibration: inputs to run it on, or a result of ``lowbit.calibrate`` with ``hessian=True``; without it, only
            the mean of x^2 of each channel counts, which may choose scales that are worse than none.
        config: the format whose errors are compared; None is ``int8_dynamic_activation_int4_weight(group_size=32)``.

    Returns:
        A `SmoothingReport`; it prints one line per kind of layer.

    Raises:
        TypeError: `rotate_` or `calibrate` would raise it; or config is no configuration.
        ValueError: `rotate_` or `calibrate` would raise it; or the calibration has not seen a layer. Nothing was
            changed.

    Example:
        >>> config = lowbit.int4_weight_only(group_size=128)
        >>> lowbit.smooth_(model, batches, config)
        >>> lowbit.quantize_(model, config, calibration=batches)
    """
    config = from_torchao(int8_dynamic_activation_int4_weight(32) if config is None else config)
    if not isinstance(config, FormatConfig):
        raise TypeError(f"smooth_: config must be a configuration or None, got {type(config).__name__}")
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
    """An input of linear layers.

    Args:
        layers: the layers that read it.
        heads: (n, d): n heads of d channels each have the same scales, as they read the same values; or (1, channels).
        move: adds the changes that divide it by scales ``[channels]``.
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
        own = scales.view(-1, shared, size)[:, 0].reshape(-1)  # the scale of each value; query heads share it

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
    """Return alpha, by how many dB the error is smaller than with 0, and the scales, float64 ``[channels]``."""
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
    """The mean of x x^T as diag(d) + F F^T, with F ``[k, RANK]`` of its largest eigenvalues: in a language model a few
    directions have most of x, and errors along them add up. Without the products F is empty."""
    if inputs.products is None:
        return inputs.importance, inputs.importance.new_zeros(len(inputs.squares), 0)
    hessian = inputs.hessian
    factor = _factor(hessian, min(RANK, len(hessian)))
    return (hessian.diagonal() - factor.square().sum(1)).clamp_min(0), factor


def _factor(hessian: Tensor, rank: int) -> Tensor:
    """F ``[k, rank]``, where F F^T has about the largest eigenvalues of ``hessian [k, k]``. torch.svd_lowrank is
    the same iteration (Halko et al. 2009, arXiv:0909.4061), but draws its first vectors from the generator that
    all threads share."""
    generator = torch.Generator("cpu").manual_seed(0)
    basis = torch.randn(len(hessian), rank, generator=generator, dtype=hessian.dtype, device="cpu")
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(hessian @ basis).Q
    values, vectors = torch.linalg.eigh(basis.T @ hessian @ basis)
    return basis @ vectors * values.clamp_min(0).sqrt()


def _error(
    weight: Tensor, scales: Tensor, inputs: InputMoments, parts: tuple[Tensor, Tensor], config: FormatConfig
) -> float:
    """The mean square of the outputs' error when the weight times the scales is quantized and its input divided."""
    spec = replace(config.spec(torch.float32), algorithm=None)
    scaled = (weight.detach().double() * scales).float()
    divided = InputMoments(inputs.rows, inputs.squares / scales.square())
    packed, _ = pack_weight(scaled, spec, None if spec.takes_absmax else divided)
    left = (scaled - torch.ops.lowbit.dequantize(packed, *spec.weight_args(*scaled.shape))) / scales.float()
    diagonal, factor = parts
    return float(left.square().sum(0, dtype=torch.float64) @ diagonal.double() + (left @ factor).square().sum())
