# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse: run the modules of a decoder or an encoder in fewer calls, in eager mode and without a compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from lowbit.quant.adapter_layers import layers_of_adapters, method_of
from lowbit.quant.fused import Fused, FusedModules
from lowbit.quant.fused_gated_norm import FusedGatedNorm, gated_norm_facts
from lowbit.quant.fused_layer_norm import FusedLayerNorm, layer_norm_facts
from lowbit.quant.fused_mlp import fuse_mlp, is_mlp
from lowbit.quant.fused_norm import FusedRMSNorm, norm_facts
from lowbit.quant.gated_mlp import fuse_gated_mlps
from lowbit.quant.lora_layers import is_product, why_not


def fuse(model: nn.Module) -> FusedModules:
    """Fuse the norms, attention, MLPs and layers of a quantized model in place, to make inference faster.

    - An RMSNorm, one with a gate, or a LayerNorm becomes one call.
    - In the attention of transformers, the q, k and v projections become one product. The head norms, the rotary
      embedding and the write to the cache become one call.
    - Multi-head latent attention (DeepSeek V2 and V3, GLM 4.7 Flash, Kimi-Linear) projects the queries of up to 16
      tokens instead of all keys and values in the cache, as a part of the call of its layer, with
      ``attn_implementation="lowbit"``.
    - In a gated MLP, the activation and the elementwise product become part of the linear calls (`fuse_gated_mlps`).
    - A gated delta net (Qwen3-Next, Qwen3.5, OLMo-hybrid, Kimi-Linear) runs on `gated_delta_rule`, a Mamba-2 mixer
      (Mamba2, Bamba, Granite 4, Falcon-H1, Nemotron-H, Zamba2) on `ssd`, a Mamba-1 mixer (Mamba, Falcon-Mamba, Jamba)
      on `selective_scan`, and these, as the short convolutions of LFM2, on `causal_conv1d`; with their gradients.
    - Attention and MLP of a block that several layers share (Zamba 2), with the adapters of each use, become parts of
      the call of all layers.
    - In a mixture of experts, the router, the experts and the shared experts become one call.
    - A decoder layer whose modules are fused, recurrent ones too, becomes one call, with
      ``attn_implementation="lowbit"`` and a cache that grows in place.
    - The layers of an encoder (BERT, XLM-R, ModernBERT, Whisper, ViT) become one call, with
      ``attn_implementation="lowbit"``. Of a batch with padding it computes the real tokens alone; at the positions of
      padding the result of the layers is 0.
    - The layers of a decoder with attention to the result of an encoder (Whisper, BART, Marian) become one call, with
      ``attn_implementation="lowbit"`` and a cache that grows in place.
    - In transformers' ``generate``, greedy or sampling, each token becomes one call, from the embedding to the logits.
    - LoRA of peft on these layers, there before or added later, is part of the calls. Other adapters run peft's code.

    `fuse` calls each module with random input before and after, and leaves it unchanged if its result differs. Names,
    parameters and the state dict stay the same. A module runs its original code under autocast or torch.compile, with
    hooks, and on devices other than the CPU; under gradients too, but for recurrent layers, RMSNorms, gated MLPs and
    most attention with a rotary embedding, which have autograd Functions, with LoRA of peft or without.

    Args:
        model: any module; its quantized layers and its norms are fused.

    Returns:
        The names of the fused modules, as a list. Its ``left`` maps the names of the other candidates to the reason why
        they were left unchanged, those of adapters that are no part of a call, and ``(model)`` if the model has no
        candidate.

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
                pieces.left.pop(name, None)  # as a gated MLP, for instance
                pieces.notes += [note for note in kind.notes if note not in pieces.notes]
            elif not any(left.startswith(f"{name}.") for left in pieces.left):  # the submodule's own reason is enough
                pieces.left.setdefault(name or _THE_MODEL, reason)
    pieces.left |= _left_to_peft(model)
    if not pieces and not pieces.left and not any(isinstance(module, Fused) for module in model.modules()):
        pieces.left[_THE_MODEL] = _NO_PIECE if "transformers" in sys.modules else f"{_NO_PIECE}; {_NO_TRANSFORMERS}"
    return pieces


def fuse_writer(model: nn.Module) -> None:
    """Fuse a copy of a language model that will write text, with lowbit's attention in place of torch's."""
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation("lowbit")
    fuse(model)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of module that can be fused.

    Args:
        is_found: whether a module may be of this kind, judged by its name, its class and the names of its submodules.
        fuse: tests the module and fuses it, or returns the reason why it stays unchanged.
        notes: what the report says once such a module is fused.
    """

    is_found: Callable[[str, nn.Module], bool]
    fuse: Callable[[nn.Module], str]
    notes: tuple[str, ...] = ()


_NO_PIECE = (
    "it has none of the pieces that fuse knows: an RMSNorm, a gated MLP (gate_proj, up_proj, down_proj), an attention "
    "of transformers with an o_proj"
)
_NO_TRANSFORMERS = "transformers is not imported, so attentions were not looked at"
_THE_MODEL = "(model)"
"""The name of the model itself in the report, where submodules have their qualified names."""


def _kinds(model: nn.Module) -> list[tuple[_Kind, ...]]:
    """Return all kinds, one tuple for each pass over the model. The kinds of a pass consist of modules fused in earlier
    passes."""
    norm = _Kind(lambda _, module: type(module).__name__.endswith("RMSNorm"), _fuse_norm)
    gated_norm = _Kind(lambda _, module: type(module).__name__.endswith("RMSNormGated"), _fuse_gated_norm)
    layer_norm = _Kind(lambda _, module: "LayerNorm" in type(module).__name__, _fuse_layer_norm)
    if "transformers" not in sys.modules:
        return [(norm, gated_norm, layer_norm)]
    from lowbit.models.delta_net_forms import CHILDREN
    from lowbit.models.fused_attention import fuse_attention, may_be_attention
    from lowbit.models.fused_causal_lm import fuse_causal_lm, has_fused_decoder
    from lowbit.models.fused_cross_decoder import fuse_cross_decoder, list_of_cross_layers
    from lowbit.models.fused_cross_layer import fuse_cross_layer, may_be_cross_layer
    from lowbit.models.fused_decoder import fuse_decoder, has_fused_layers
    from lowbit.models.fused_delta_net import fuse_delta_net
    from lowbit.models.fused_encoder import fuse_encoder, list_of_encoder_layers
    from lowbit.models.fused_encoder_layer import fuse_encoder_layer, may_be_encoder_layer
    from lowbit.models.fused_latent_attention import fuse_latent_attention, may_be_latent_attention
    from lowbit.models.fused_layer import fuse_decoder_layer, may_be_layer
    from lowbit.models.fused_mamba import NOTE, fuse_mamba, may_be_mamba
    from lowbit.models.fused_mamba2 import fuse_mamba2, may_be_mamba2
    from lowbit.models.fused_mixture import fuse_mixture, has_packed_experts
    from lowbit.models.fused_self_attention import fuse_self_attention, may_be_self_attention
    from lowbit.models.fused_shared_layer import fuse_shared_layer, may_be_shared_layer
    from lowbit.models.fused_short_conv import fuse_short_conv, may_be_short_conv
    from lowbit.models.shared_block import (
        fuse_shared_attention,
        fuse_shared_mlp,
        may_be_shared_attention,
        may_be_shared_mlp,
    )

    columns = _rotary_columns(model)
    attention = _Kind(lambda _, module: may_be_attention(module), lambda module: fuse_attention(module, columns))
    recurrent = [
        _recurrent(lambda module: module._modules.keys() in CHILDREN, fuse_delta_net),
        _recurrent(may_be_mamba, fuse_mamba, NOTE),
        _recurrent(may_be_mamba2, fuse_mamba2),
        _recurrent(may_be_short_conv, fuse_short_conv),
    ]
    mixture = _Kind(lambda _, module: has_packed_experts(module), fuse_mixture)
    latent = _Kind(lambda _, module: may_be_latent_attention(module), fuse_latent_attention)
    shared_attention = _Kind(
        lambda _, module: may_be_shared_attention(module), lambda module: fuse_shared_attention(module, columns)
    )
    shared_mlp = _Kind(lambda _, module: may_be_shared_mlp(module), fuse_shared_mlp)
    shared_layer = _Kind(lambda _, module: may_be_shared_layer(module), fuse_shared_layer)
    self_attention = _Kind(lambda _, module: may_be_self_attention(module), fuse_self_attention)
    encoder_layer = _Kind(may_be_encoder_layer, fuse_encoder_layer)
    cross_layer = _Kind(may_be_cross_layer, fuse_cross_layer)
    layer = _Kind(lambda _, module: may_be_layer(module), fuse_decoder_layer)
    encoder = _Kind(lambda _, module: bool(list_of_encoder_layers(module)), fuse_encoder)
    cross_decoder = _Kind(lambda _, module: bool(list_of_cross_layers(module)), fuse_cross_decoder)
    decoder = _Kind(lambda name, module: bool(name) and has_fused_layers(module), fuse_decoder)
    model = _Kind(lambda _, module: has_fused_decoder(module), fuse_causal_lm)
    mlp = _Kind(lambda _, module: is_mlp(module), fuse_mlp)
    parts = (*recurrent, shared_attention, shared_mlp, self_attention, attention, latent, norm, layer_norm, mlp)
    layers = (encoder_layer, cross_layer, shared_layer, layer)
    return [(gated_norm,), parts, (mixture,), layers, (encoder, cross_decoder, decoder), (model,)]


def _recurrent(
    may_be: Callable[[nn.Module], bool], fuse_one: Callable[[nn.Module, list[nn.Module]], str], *notes: str
) -> _Kind:
    """Return a kind of recurrent layers, of which those that are alike are tried once."""
    tried: list[nn.Module] = []
    return _Kind(lambda _, module: may_be(module), lambda module: fuse_one(module, tried), notes)


def _fuse_norm(module: nn.Module) -> str:
    facts = norm_facts(module)
    if facts is None:
        on_cpu = all(parameter.is_cpu for parameter in module.parameters())
        return "its results are not those of rms_norm" if on_cpu else "it is not on the CPU, where the kernel rows are"
    FusedRMSNorm.take(module, facts)
    return ""


def _fuse_gated_norm(module: nn.Module) -> str:
    facts = gated_norm_facts(module)
    if facts is None:
        return "its results are not those of gated_rms_norm"
    FusedGatedNorm.take(module, facts)
    return ""


def _fuse_layer_norm(module: nn.Module) -> str:
    facts = layer_norm_facts(module)
    if facts is None:
        return "its results are not those of layer_norm"
    FusedLayerNorm.take(module, facts)
    return ""


def _rotary_columns(model: nn.Module) -> list[int]:
    """Return how many columns of a head each rotary embedding of the model rotates: two per frequency."""
    frequencies = (buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    return list(dict.fromkeys(2 * buffer.numel() for buffer in frequencies))


def _left_to_peft(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of adapter layers that are no steps of a program now, each with the reason."""
    for name, layer in layers_of_adapters(model):
        if is_product(layer):
            reason = why_not(layer)
        else:
            base = type(layer.get_base_layer()).__name__
            reason = (
                f"an adapter of peft ({method_of(type(layer))}) over {base}; fused calls add LoRA over a QuantLinear"
            )
        if reason:
            yield name, reason
