# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse: the small pieces of a decoder as few calls, in eager mode, without a compiler."""

from __future__ import annotations

import sys

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
    columns = _rotary_columns(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Fused):
            continue
        if "o_proj" in module._modules and "transformers" in sys.modules:
            from lowbit.integrations.fused_attention import fuse_attention

            reason = fuse_attention(module, columns)
            if reason:
                pieces.left[name] = reason
            else:
                pieces.append(name)
        elif type(module).__name__.endswith("RMSNorm"):
            facts = norm_facts(module)
            if facts is not None:
                FusedRMSNorm.take(module, facts)
                pieces.append(name)
            elif any(not parameter.is_cpu for parameter in module.parameters()):
                pieces.left[name] = "it is not on the CPU, where the kernel rows are"
            else:
                pieces.left[name] = "its results are not those of rms_norm"
    if "transformers" in sys.modules:
        _fuse_layers(model, pieces)
    return pieces


def _fuse_layers(model: nn.Module, pieces: FusedModules) -> None:
    """Fuse the decoder layers whose pieces are fused, then the decoders whose layers are. A module with a piece in
    ``left`` is reported with the reason of that piece."""
    from lowbit.integrations.decoder_pieces import is_decoder_layer
    from lowbit.integrations.fused_decoder import fuse_decoder
    from lowbit.integrations.fused_layer import FusedDecoderLayer, fuse_decoder_layer

    def take(name: str, reason: str) -> None:
        if not reason:
            pieces.append(name)
        elif not any(left.startswith(f"{name}.") for left in pieces.left):
            pieces.left[name] = reason

    named = [(name, module) for name, module in model.named_modules() if not isinstance(module, Fused)]
    for name, module in named:
        if is_decoder_layer(module):
            take(name, fuse_decoder_layer(module))
    for name, module in named:
        layers = list(module._modules.get("layers", nn.ModuleList())._modules.values())  # one may be there twice
        if name and len(layers) > 1 and all(isinstance(layer, FusedDecoderLayer) for layer in layers):
            take(name, fuse_decoder(module))


def _rotary_columns(model: nn.Module) -> list[int]:
    """The columns of a head that the rotary embeddings of the model rotate, two for each of their frequencies."""
    frequencies = (buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    return list(dict.fromkeys(2 * buffer.numel() for buffer in frequencies))
