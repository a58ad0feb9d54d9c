# SPDX-License-Identifier: Apache-2.0
"""lowbit.rotate_: rotate a decoder's residual stream, so that no channel has outliers.

With the gains g of each RMSNorm folded into the layers behind it, stream x -> x R for an orthogonal R changes nothing:
R passes through the norm, a layer that reads has W diag(g) R, one that writes R^T W. In the same way values v -> v Q of
each head go through attention to o_proj.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbit.models.decoder_pieces import Decoder, Half, Norm, decoder_of
from lowbit.models.folded_weights import Changes, make_checked
from lowbit.quant.rotation import KINDS, Rotation, rotation


@dataclass(frozen=True, slots=True)
class RotationReport:
    """The report of `rotate_`.

    Attributes:
        stream: R; ``stream.matrix()`` is float64 ``[hidden, hidden]``.
        heads: Q, or None.
        layers: the number of decoder layers.
        untied: whether the embedding and the head shared a weight before and no longer do.
        difference: the relative difference of the logits of random tokens, before and after; computed in float64, where
            that is possible, with the weights in their dtype. It is the error of rounding them.
    """

    stream: Rotation
    heads: Rotation | None
    layers: int
    untied: bool
    difference: float

    def __repr__(self) -> str:
        heads = f"values of heads turned by {self.heads.name}" if self.heads else "heads as they were"
        untied = "\nuntied: embedding and head have a weight each, as the last norm's gains are in the head alone"
        return (
            f"residual stream turned by {self.stream.name}, {heads}; {self.layers} layers, gains of norms folded; "
            f"logits differ by {self.difference:.1e}{untied if self.untied else ''}"
        )


def rotate_(model: nn.Module, kind: str = "hadamard", *, seed: int = 0, heads: bool = True) -> RotationReport:
    """Turn the residual stream of a language model of transformers in place, before it is quantized.

    Weights and activations with outliers in a few channels need large scales for all of them; turned by a Hadamard
    matrix, each channel has a part of every outlier. The model computes the same results: gains of RMSNorm go into the
    linear layers behind (and become 1), the rotation into the embedding, the head, and every layer that reads or
    writes the stream. (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456; SpinQuant, Liu et al. 2024, arXiv:2405.16406,
    its R1 and R2.)

    For decoders whose layers have two RMSNorms, ``self_attn`` and ``mlp``: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma,
    Granite, SmolLM3. Everything is checked, and the turned model is run on random tokens, before the first weight is
    changed. Parameters stay the same objects; gradients are dropped.

    A head that is tied to the embedding gets a weight of its own, as the last norm's gains go into the head alone, and
    ``config.tie_word_embeddings`` becomes False; they stay tied where these gains are all equal.

    Args:
        model: a model in float32, bfloat16, float16 or float64 on the CPU, without adapters and hooks.
        kind: "hadamard": random signs and a Hadamard matrix, where the width has one that can be made (as 576, 896 and
            4096 have); else the odd part of the width is a random orthogonal matrix. "orthogonal": a random one.
        seed: the seed of the random signs or matrix.
        heads: turn the values of each head too, which o_proj takes back.

    Returns:
        A `RotationReport`; it prints the changes.

    Raises:
        TypeError: model is no module, seed no int, or a weight of another dtype.
        ValueError: kind is another; the model has another piece (LayerNorm, norms behind attention as Gemma 2,
            experts), is quantized, has adapters or hooks, shares weights, or is not on the CPU; or it computes
            something else with the turned weights. The error names the piece, and nothing was changed.

    Example:
        >>> lowbit.rotate_(model)
        >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    """
    if kind not in KINDS:
        raise ValueError(f"rotate_: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"rotate_: seed must be an int, got {type(seed).__name__}")
    decoder = decoder_of("rotate_", model)
    generator = torch.Generator("cpu").manual_seed(seed)
    stream = rotation(kind, decoder.hidden, generator)
    of_heads = rotation(kind, _head_dim(decoder), generator) if heads else None
    changes = _changes(decoder, stream, of_heads)
    was_tied = decoder.tied
    difference = make_checked("rotate_", model, decoder.words, changes)
    untied = was_tied and not decoder.tied
    if untied:
        untie(model)
    return RotationReport(stream, of_heads, len(decoder.halves) // 2, untied, difference)


def untie(model: nn.Module) -> None:
    """Tell transformers that the head of the model has a weight of its own."""
    config = getattr(model, "config", None)
    if config is not None:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    if hasattr(model, "all_tied_weights_keys"):
        model.all_tied_weights_keys = {}  # nothing else is shared in a model that has these pieces alone


def _head_dim(decoder: Decoder) -> int:
    sizes = {half.head_dim for half in decoder.halves if half.head_dim}
    if len(sizes) != 1:
        raise ValueError(f"rotate_: heads must be of one size in all layers, got {sorted(sizes)}; or heads=False")
    return sizes.pop()


def _changes(decoder: Decoder, stream: Rotation, heads: Rotation | None) -> Changes:
    changes = Changes()
    changes.add(decoder.embedding, "weight", stream.turn)
    for half in decoder.halves:
        _fold(half.norm, changes, stream)
        if heads is not None and half.head_dim:
            _turn_heads(half, changes, heads)
        changes.add(half.writer, "weight", lambda weight: stream.turn(weight.T).T)
        changes.add(half.writer, "bias", stream.turn)
    gains = decoder.last.module.weight
    if decoder.tied and bool((gains == gains[0]).all()):
        changes.add(decoder.head, "weight", stream.turn)
    else:
        _fold(decoder.last, changes, stream)
    return changes


def _fold(norm: Norm, changes: Changes, stream: Rotation) -> None:
    """Take the gains of the norm, and the rotation of its input, into the layers behind it."""
    gains = norm.offset + norm.module.weight.detach().double()
    for reader in norm.readers:
        changes.add(reader, "weight", lambda weight: stream.turn(weight * gains))
    changes.add(norm.module, "weight", lambda weight: torch.full_like(weight, 1 - norm.offset))


def _turn_heads(half: Half, changes: Changes, heads: Rotation) -> None:
    """Turn the values of each head, and take that back in front of o_proj."""

    def turned(values: Tensor) -> Tensor:
        """Turn the rows of a weight [n, k] or a bias [n]."""
        by_heads = values.reshape(-1, half.head_dim, *values.shape[1:])
        return heads.turn(by_heads.movedim(1, -1)).movedim(-1, 1).reshape(values.shape)

    changes.add_to_last_rows(half.inner, half.inner_rows, turned)
    changes.add(half.writer, "weight", _by_heads(heads, half.head_dim))


def _by_heads(heads: Rotation, size: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: heads.turn(weight.reshape(len(weight), -1, size)).reshape(weight.shape)
