# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse: the small pieces of a decoder as few calls, in eager mode, without a compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lowbit.quant.fused import Fused, FusedModules
from lowbit.quant.fused_norm import FusedRMSNorm, norm_facts
from lowbit.quant.gated_mlp import fuse_gated_mlps


def fuse(model: nn.Module) -> FusedModules:
    """Make the pieces around the linear layers of a quantized language model faster, in place.

    - An RMSNorm is one call.
    - Attention of transformers: q, k and v are multiplied as one weight; norms of heads, the rotary embedding and the
      writing of the cache are one call.
    - Gated MLPs: activation and product are part of the linear calls (`fuse_gated_mlps`).
    - A decoder layer of these pieces, with ``attn_implementation="lowbit"`` and a cache that grows in place,
      is one call.
    - A token of transformers' ``generate``, greedy or sampling, is one call, from the embedding to the logits.

    Each piece is called with random input before and after: one that then computes something else stays as it is.
    Names, parameters and state dict stay too. Where gradients, autocast, torch.compile, hooks or an adapter come in,
    a piece computes as it did before, and so it does on other devices than the CPU.

    Args:
        model: any module; quantized layers are fused, and norms.

    Returns:
        Names of the modules that were fused, a list; ``left`` has the others, with reasons.

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
    """A kind of pieces.

    Args:
        is_found: whether a module of this name may be one, by its class and the names inside.
        fuse: tries it, and fuses it or returns why it stays as it is.
    """

    is_found: Callable[[str, nn.Module], bool]
    fuse: Callable[[nn.Module], str]


_THE_MODEL = "(model)"
"""Its name in the report, where modules inside of it have their qualified names."""


def _kinds(model: nn.Module) -> list[tuple[_Kind, ...]]:
    """All kinds; those in one tuple are found in one pass, and made of pieces of the passes before. Halves of layers
    have their steps in `half_steps.HALF_STEPS`."""
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
    """The columns of a head that the rotary embeddings of the model rotate, two for each of their frequencies."""
    frequencies = (buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    return list(dict.fromkeys(2 * buffer.numel() for buffer in frequencies))
