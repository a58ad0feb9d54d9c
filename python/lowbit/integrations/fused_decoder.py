# SPDX-License-Identifier: Apache-2.0
"""The decoder of a language model of transformers, with all of its layers in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.integrations.fused_layer import FusedDecoderLayer, JoinedLayers
from lowbit.integrations.layer_program import LayerProgram
from lowbit.quant.fused import Fused, hooked, probe_of

_SHARED = ("attention_mask", "position_embeddings", "past_key_values")


class FusedDecoder(Fused):
    """A model of fused layers; made in place by `lowbit.fuse`. In its forward, the last layer computes all of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        layers = facts["layers"]
        own = self.training or torch.compiler.is_compiling() or kwargs.get("output_hidden_states")
        if own or not self._hands_on(layers):  # in training, models may leave layers out
            return super().forward(*args, **kwargs)
        with JoinedLayers(layers, facts["kinds"], facts):
            return super().forward(*args, **kwargs)

    def _hands_on(self, layers: tuple[FusedDecoderLayer, ...]) -> bool:
        """Whether a call goes through the layers as it did when they were fused, and nothing waits between them."""
        now, config = self._modules["layers"], self.config
        modules = now._modules
        same = len(modules) == len(layers) == config.num_hidden_layers and all(map(is_, modules.values(), layers))
        fused = all([isinstance(layer, FusedDecoderLayer) for layer in layers])
        return same and fused and not config.output_hidden_states and not hooked(now, modules)


def has_fused_layers(module: nn.Module) -> bool:
    """Whether the module has a list of layers, all of which were fused."""
    layers = list(module._modules.get("layers", nn.ModuleList())._modules.values())  # one may be there twice
    return len(layers) > 1 and all(isinstance(layer, FusedDecoderLayer) for layer in layers)


def fuse_decoder(module: nn.Module) -> str:
    """Fuse ``module``, whose ``layers`` were fused, or return why it stays as it is.

    Whether it only hands the result of each layer to the next, with the same cache, is found out by calls in which each
    layer returns something of its own. Layers that get the same mask and rotary embedding there are of one kind.
    """
    layers = tuple(module.layers)
    if len({layer.self_attn.layer_idx for layer in layers}) < len(layers):
        return "two of its layers write to one layer of the cache (layer_idx)"
    kinds = _kinds_if_only_handing_on(module, layers)
    if kinds is None:
        return "it does not hand one cache and the result of each layer to the next"
    FusedDecoder.take(module, {"layers": layers, "kinds": kinds, "kept": LayerProgram()})
    return ""


@torch.no_grad()
def _kinds_if_only_handing_on(module: nn.Module, layers: tuple[nn.Module, ...]) -> tuple[int, ...] | None:
    """The probe has padding: without, models have no mask, not even where their layers have windows."""
    hidden = layers[0].input_layernorm.weight.numel()
    generator = torch.Generator("cpu").manual_seed(0)
    x, last, *others = torch.randn(2 * len(layers), 1, 3, hidden, generator=generator, device="cpu")
    first, second = others[: len(layers) - 1], others[len(layers) - 1 :]
    results, calls = _called(module, x, layers, [*first, last])
    again, _ = _called(module, x, layers, [*second, last])
    if len(calls) != len(layers) or not results.numel() or not results.equal(again):
        return None
    handed, cache = [calls[0][1], *first], calls[0][2][2]
    numbers: dict[tuple[int, int], int] = {}
    kinds = []
    for (called, given, shared), layer, of in zip(calls, layers, handed, strict=True):
        if called is not layer or not given.equal(of) or None in shared or shared[2] is not cache:
            return None
        kinds.append(numbers.setdefault((id(shared[0]), id(shared[1])), len(numbers)))  # held by `calls`
    return tuple(kinds)


_Call = tuple[Any, Tensor, tuple[Any, ...]]
"""The layer that was called, its input, and its mask, rotary embedding and cache."""


def _called(
    module: nn.Module, x: Tensor, layers: tuple[nn.Module, ...], results: list[Tensor]
) -> tuple[Tensor, list[_Call]]:
    """The result of the module, and its calls of the layers, each of which returns its entry of ``results``."""
    calls: list[_Call] = []
    probe = _probe_of(module)
    for at, layer, result in zip(probe.layers._modules.values(), layers, results, strict=True):
        at.forward = _stand_in(layer, result, calls)
    return _result(probe, x), calls


def _probe_of(module: nn.Module) -> nn.Module:
    """A copy of the model with pieces and a configuration of its own, set to lowbit's attention."""
    children = {name: probe_of(child) for name, child in module._modules.items() if child is not None}
    layers = {name: probe_of(layer) for name, layer in module.layers._modules.items()}
    children["layers"] = probe_of(module.layers, **layers)
    probe = probe_of(module, **children)
    probe.config = copy.deepcopy(module.config)
    probe.config._attn_implementation = "lowbit"
    return probe


def _stand_in(layer: nn.Module, result: Tensor, calls: list[_Call]) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        calls.append((layer, hidden_states, tuple(kwargs.get(name) for name in _SHARED)))
        return result

    return forward


def _result(probe: nn.Module, x: Tensor) -> Tensor:
    """The result of the probe; empty where it takes other arguments."""
    seen = torch.tensor([[0, 1, 1]], device="cpu")
    try:
        return probe(inputs_embeds=x, attention_mask=seen, use_cache=True).last_hidden_state
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):
        return x.new_empty(0)
