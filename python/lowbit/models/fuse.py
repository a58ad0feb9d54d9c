# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse: run the small pieces of a decoder in a few calls, in eager mode and without a compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lowbit.quant.fused import Fused, FusedModules
from lowbit.quant.fused_norm import FusedRMSNorm, norm_facts
from lowbit.quant.gated_mlp import fuse_gated_mlps


def fuse(model: nn.Module) -> FusedModules:
    """Speed up the pieces around the linear layers of a quantized language model, in place.

    - An RMSNorm becomes one call.
    - In the attention of transformers, q, k and v become one product, and the norms of heads, the rotary embedding and
      the write to the cache become one call.
    - In a gated MLP, the activation and the elementwise product become part of the linear calls (`fuse_gated_mlps`).
    - A decoder layer of these pieces, with ``attn_implementation="lowbit"`` and a cache that grows in place, becomes
      one call.
    - A token of transformers' ``generate``, greedy or sampling, becomes one call, from the embedding to the logits.

    `fuse` calls each piece with random input before and after, and leaves a piece unchanged if its result differs.
    Names, parameters and the state dict stay the same. A piece runs its original code under gradients, autocast or
    torch.compile, with hooks or an adapter, and on devices other than the CPU.

    Args:
        model: any module; its quantized layers and its norms are fused.

    Returns:
        A list of the names of the fused modules. Its ``left`` maps the other names to reasons.

    Raises:
        ValueError: a gated MLP is on the meta device, where it cannot be called.

    Example:
        >>> lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight())
        >>> lowbit.fuse(model)
        model.layers.*.input_layernorm x 30
        ...
    """
    pieces = fuse_gated_mlps(model)
    for kinds in _kinds(model):
        for name, module in [(name, module) for name, module in model.named_modules() if not isinstance(module, Fused)]:
            kind = next((kind for kind in kinds if kind.is_found(name, module)), None)
            if kind is None:
                continue
            reason = kind.fuse(module)
            if not reason:
                pieces.append(name or _THE_MODEL)
            elif not any(left.startswith(f"{name}.") for left in pieces.left):  # that piece is the reason
                pieces.left[name or _THE_MODEL] = reason
    return pieces


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of piece.

    Args:
        is_found: whether a module may be of this kind, by its name, its class and the names of its submodules.
        fuse: tests the module and fuses it, or returns the reason why it stays unchanged.
    """

    is_found: Callable[[str, nn.Module], bool]
    fuse: Callable[[nn.Module], str]


_THE_MODEL = "(model)"
"""The name of the model itself in the report, where its submodules have their qualified names."""


def _kinds(model: nn.Module) -> list[tuple[_Kind, ...]]:
    """Return all kinds. Each tuple is one pass over the model, and its kinds consist of pieces of earlier passes.
    `half_steps.HALF_STEPS` has the steps of the halves of layers."""
    norm = _Kind(lambda _, module: type(module).__name__.endswith("RMSNorm"), _fuse_norm)
    if "transformers" not in sys.modules:
        return [(norm,)]
    from lowbit.models.decoder_pieces import is_decoder_layer
    from lowbit.models.fused_attention import fuse_attention
    from lowbit.models.fused_causal_lm import fuse_causal_lm, has_fused_decoder
    from lowbit.models.fused_decoder import fuse_decoder, has_fused_layers
    from lowbit.models.fused_layer import fuse_decoder_layer

    columns = _rotary_columns(model)
    attention = _Kind(lambda _, module: "o_proj" in module._modules, lambda module: fuse_attention(module, columns))
    layer = _Kind(lambda _, module: is_decoder_layer(module), fuse_decoder_layer)
    decoder = _Kind(lambda name, module: bool(name) and has_fused_layers(module), fuse_decoder)
    model = _Kind(lambda _, module: has_fused_decoder(module), fuse_causal_lm)
    return [(attention, norm), (layer,), (decoder,), (model,)]


def _fuse_norm(module: nn.Module) -> str:
    facts = norm_facts(module)
    if facts is None:
        on_cpu = all(parameter.is_cpu for parameter in module.parameters())
        return "its results are not those of rms_norm" if on_cpu else "it is not on the CPU, where the kernel rows are"
    FusedRMSNorm.take(module, facts)
    return ""


def _rotary_columns(model: nn.Module) -> list[int]:
    """Return how many columns of a head each rotary embedding of the model rotates: two per frequency."""
    frequencies = (buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    return list(dict.fromkeys(2 * buffer.numel() for buffer in frequencies))
