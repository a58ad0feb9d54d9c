# SPDX-License-Identifier: Apache-2.0
"""The decoder of a language model of transformers, with all of its layers in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.integrations.fused_layer import FusedDecoderLayer, running
from lowbit.quant.fused import Fused, hooked

_SHARED = ("attention_mask", "position_embeddings", "past_key_values")


class FusedDecoder(Fused):
    """A model of fused layers; made in place by `lowbit.fuse`. Its forward is its own; the layers learn from it that
    they follow each other."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        before = running.layers, running.result
        running.layers, running.result = self._layers(), None
        try:
            return super().forward(*args, **kwargs)
        finally:
            running.layers, running.result = before

    def _layers(self) -> tuple[FusedDecoderLayer, ...]:
        """The layers, if a call goes through them as it did when they were fused, and nothing waits between them."""
        layers, now = self.facts["layers"], self._modules["layers"]
        modules = now._modules
        same = len(modules) == len(layers) == self.config.num_hidden_layers and all(map(_is, modules.values(), layers))
        return layers if same and not hooked(now, modules) else ()


def _is(one: nn.Module, other: nn.Module) -> bool:
    return one is other


def fuse_decoder(module: nn.Module) -> str:
    """Fuse ``module``, whose ``layers`` were fused, or return why it stays as it is.

    Whether it only hands the result of each layer to the next, with the same mask, rotary embedding and cache, is found
    out by a call in which each layer returns something of its own.
    """
    layers = tuple(module.layers)
    if any(layer.facts["same"] != layers[0].facts["same"] for layer in layers):
        return "its layers differ in eps, scale or activation"
    if not _hands_on(module, layers):
        return "it does not hand one mask, rotary embedding and cache through all layers"
    FusedDecoder.take(module, {"layers": layers})
    return ""


@torch.no_grad()
def _hands_on(module: nn.Module, layers: tuple[nn.Module, ...]) -> bool:
    """The probe has padding: without, models have no mask, not even where their layers have windows."""
    hidden = layers[0].input_layernorm.weight.numel()
    generator = torch.Generator("cpu").manual_seed(0)
    x, *results = torch.randn(1 + len(layers), 1, 3, hidden, generator=generator, device="cpu")
    calls: list[tuple[nn.Module, Tensor, tuple[Any, ...]]] = []

    def stand_in(layer: nn.Module, result: Tensor) -> Any:
        def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            calls.append((layer, hidden_states, tuple(kwargs.get(name) for name in _SHARED)))
            return result

        return forward

    seen = torch.tensor([[0, 1, 1]], device="cpu")
    config, training = module.config, module.training
    implementation, config._attn_implementation = config._attn_implementation, "lowbit"
    module.training = False
    try:
        for layer, result in zip(layers, results, strict=True):
            layer.forward = stand_in(layer, result)
        module(inputs_embeds=x, attention_mask=seen, use_cache=True)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):  # it takes something else
        return False
    finally:
        module.training, config._attn_implementation = training, implementation
        for layer in layers:
            layer.__dict__.pop("forward", None)
    handed = [None, *results[:-1]]
    return len(calls) == len(layers) and all(
        called is layer and (of is None or given is of) and None not in shared and all(map(_is, shared, calls[0][2]))
        for (called, given, shared), layer, of in zip(calls, layers, handed, strict=True)
    )
