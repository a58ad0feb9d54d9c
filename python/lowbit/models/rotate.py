# SPDX-License-Identifier: Apache-2.0
"""lowbit.rotate_: rotate a decoder's residual stream, so that no channel has outliers.

Once the gains g of each RMSNorm are folded into the layers after it, replacing the stream x by x R with an orthogonal R
preserves the model's results. R commutes with the norm; a layer that reads the stream gets the weight W diag(g) R, and
a layer that writes it R^T W. In the same way the values of each head, v -> v Q, pass through attention to o_proj.
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
        difference: the relative difference between the logits of random tokens before and after. They are computed in
            float64 if the model can run in it, from the weights in their own dtype, so this is the error of rounding
            the weights.
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
    """Rotate the residual stream of a transformers language model in place, before it is quantized.

    If a few channels of weights and activations have outliers, all channels need large scales. After a rotation by a
    Hadamard matrix, each outlier is spread over all channels. The model's results stay the same: the gains of each
    RMSNorm move into the linear layers after it (and become 1), and the rotation into the embedding, the head, and
    every layer that reads or writes the stream. (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456; SpinQuant, Liu et al.
    2024, arXiv:2405.16406, R1 and R2.)

    Supported are decoders whose layers have two RMSNorms, ``self_attn`` and ``mlp``: Llama, Mistral, Qwen2, Qwen3,
    Phi-3, Gemma, Granite, SmolLM3. Before the first weight changes, everything is checked and the rotated model is run
    on random tokens. Parameters stay the same objects; their gradients are dropped.

    A head that is tied to the embedding gets a weight of its own, because the gains of the last norm go into the head
    only, and ``config.tie_word_embeddings`` becomes False. If these gains are all equal, head and embedding stay tied.

    Args:
        model: a model in float32, bfloat16, float16 or float64 on the CPU, without adapters and hooks.
        kind: "hadamard" for a Hadamard matrix with random signs. If none can be constructed for the width (it can for
            576, 896 and 4096, for example), a random orthogonal matrix is used for the odd factor of the width.
            "orthogonal" for a random orthogonal matrix.
        seed: the seed of the random signs or matrix.
        heads: whether to rotate the values of each head too; o_proj undoes this.

    Returns:
        A `RotationReport`; it prints the changes.

    Raises:
        TypeError: ``model`` is not a module, ``seed`` is not an int, or a weight has another dtype.
        ValueError: ``kind`` is unknown; the model has an unsupported module (LayerNorm, norms after attention as in
            Gemma 2, experts), is quantized, has adapters or hooks, shares weights, or is not on the CPU; or its results
            change with the rotated weights. The error names the module, and nothing was changed.

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
        model.all_tied_weights_keys = {}  # nothing else is shared in a model that passed the checks


def _head_dim(decoder: Decoder) -> int:
    sizes = {half.head_dim for half in decoder.halves if half.head_dim}
    if len(sizes) != 1:
        raise ValueError(
            f"rotate_: heads must have one size in all layers, got {sorted(sizes)}; pass heads=False to leave them"
        )
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
    """Fold the gains of the norm, and the rotation of its input, into the layers that read it."""
    gains = norm.offset + norm.module.weight.detach().double()
    for reader in norm.readers:
        changes.add(reader, "weight", lambda weight: stream.turn(weight * gains))
    changes.add(norm.module, "weight", lambda weight: torch.full_like(weight, 1 - norm.offset))


def _turn_heads(half: Half, changes: Changes, heads: Rotation) -> None:
    """Rotate the values of each head, and undo that in o_proj."""

    def turned(values: Tensor) -> Tensor:
        """Rotate the rows of a weight [n, k] or a bias [n]."""
        by_heads = values.reshape(-1, half.head_dim, *values.shape[1:])
        return heads.turn(by_heads.movedim(1, -1)).movedim(-1, 1).reshape(values.shape)

    changes.add_to_last_rows(half.inner, half.inner_rows, turned)
    changes.add(half.writer, "weight", _by_heads(heads, half.head_dim))


def _by_heads(heads: Rotation, size: int) -> Callable[[Tensor], Tensor]:
    return lambda weight: heads.turn(weight.reshape(len(weight), -1, size)).reshape(weight.shape)
