# SPDX-License-Identifier: Apache-2.0
"""The decoder of a language model of transformers, with all of its layers in one call."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.integrations.fused_layer import FusedDecoderLayer, in_one_call
from lowbit.integrations.layer_weights import LayerWeights
from lowbit.quant.fused import Fused, hooked, probe_of

_SHARED = ("attention_mask", "position_embeddings", "past_key_values")


class FusedDecoder(Fused):
    """A model of fused layers; made in place by `lowbit.fuse`. In its forward the list of layers has one item, the call
    of all layers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layers = self.facts["layers"]
        if torch.compiler.is_compiling() or kwargs.get("output_hidden_states") or not self._hands_on(layers):
            return super().forward(*args, **kwargs)
        with _Pass(self._modules["layers"], AllLayers(self.facts)):
            return super().forward(*args, **kwargs)

    def _hands_on(self, layers: tuple[FusedDecoderLayer, ...]) -> bool:
        """Whether a call goes through the layers as it did when they were fused, and nothing waits between them."""
        now, config = self._modules["layers"], self.config
        modules = now._modules
        same = len(modules) == len(layers) == config.num_hidden_layers and all(map(is_, modules.values(), layers))
        fused = isinstance(now, FusedLayers) and isinstance(layers[0], FusedDecoderLayer)  # the one with their facts
        return same and fused and not config.output_hidden_states and not hooked(now, modules)


class AllLayers:
    """The layers behind one another, in one call where that is possible."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.layers: tuple[FusedDecoderLayer, ...] = facts["layers"]
        self.facts = facts

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = None if args else in_one_call(self.layers, self.facts, hidden_states, **kwargs)
        if y is None:
            y = hidden_states
            for layer in self.layers:
                y = layer(y, *args, **kwargs)
        return y


class FusedLayers(Fused):
    """The list of the layers of a `FusedDecoder`."""

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if _running.list is not self else iter((_running.item,))

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        if _running.list is self:
            return (_running.item,)
        return self.unfused(list(self._modules.values())[index])


class _Running(threading.local):
    """The pass that this thread is in."""

    list: FusedLayers | None = None
    item: Callable[..., Any] | None = None


_running = _Running()


class _Pass:
    """While it is entered, iterating over ``layers``, or a slice of it, gives ``item`` alone, in this thread."""

    def __init__(self, layers: FusedLayers, item: Callable[..., Any]) -> None:
        self.now = layers, item

    def __enter__(self) -> None:
        self.before = _running.list, _running.item
        _running.list, _running.item = self.now

    def __exit__(self, *_: Any) -> None:
        _running.list, _running.item = self.before


def fuse_decoder(module: nn.Module) -> str:
    """Fuse ``module``, whose ``layers`` were fused, or return why it stays as it is.

    Whether it only hands the result of each layer to the next, with the same mask, rotary embedding and cache, is found
    out by calls in which each layer returns something of its own.
    """
    layers = tuple(module.layers)
    if any(layer.facts["same"] != layers[0].facts["same"] for layer in layers):
        return "its layers differ in eps, scale or activation"
    if len({layer.self_attn.layer_idx for layer in layers}) < len(layers):
        return "two of its layers write to one layer of the cache (layer_idx)"
    if not _only_hands_on(module, layers):
        return "it does not hand one mask, rotary embedding and cache through all layers"
    FusedLayers.take(module.layers, {})
    FusedDecoder.take(module, {"layers": layers, "kept": LayerWeights()})
    return ""


@torch.no_grad()
def _only_hands_on(module: nn.Module, layers: tuple[nn.Module, ...]) -> bool:
    """The probe has padding: without, models have no mask, not even where their layers have windows."""
    hidden = layers[0].input_layernorm.weight.numel()
    generator = torch.Generator("cpu").manual_seed(0)
    x, last, *others = torch.randn(2 * len(layers), 1, 3, hidden, generator=generator, device="cpu")
    first, second = others[: len(layers) - 1], others[len(layers) - 1 :]
    results, calls = _called(module, x, layers, [*first, last])
    again, _ = _called(module, x, layers, [*second, last])
    alone, call_of_all = _called_as_one(module, x, last)
    if len(calls) != len(layers) or len(call_of_all) != 1 or not results.equal(again) or not results.equal(alone):
        return False
    handed = [call_of_all[0][1], *first]
    return all(
        called is layer and given.equal(of) and None not in shared and all(map(is_, shared, calls[0][2]))
        for (called, given, shared), layer, of in zip(calls, layers, handed, strict=True)
    )


_Call = tuple[Any, Tensor, tuple[Any, ...]]
"""The layer that was called, its input, and the arguments that all layers share."""


def _called(
    module: nn.Module, x: Tensor, layers: tuple[nn.Module, ...], results: list[Tensor]
) -> tuple[Tensor, list[_Call]]:
    """The result of the module, and its calls of the layers, each of which returns its entry of ``results``."""
    calls: list[_Call] = []
    probe = _probe_of(module)
    for at, layer, result in zip(probe.layers._modules.values(), layers, results, strict=True):
        at.forward = _stand_in(layer, result, calls)
    return _result(probe, x), calls


def _called_as_one(module: nn.Module, x: Tensor, result: Tensor) -> tuple[Tensor, list[_Call]]:
    """The same where the list of layers is one item."""
    calls: list[_Call] = []
    probe = _probe_of(module)
    with _Pass(probe.layers, _stand_in(None, result, calls)):
        return _result(probe, x), calls


def _probe_of(module: nn.Module) -> nn.Module:
    """A copy of the model with pieces and a configuration of its own, set to lowbit's attention."""
    children = {name: probe_of(child) for name, child in module._modules.items() if child is not None}
    layers = {name: probe_of(layer) for name, layer in module.layers._modules.items()}
    children["layers"] = probe_of(module.layers, **layers)
    FusedLayers.take(children["layers"], {})
    probe = probe_of(module, **children)
    probe.config = copy.deepcopy(module.config)
    probe.config._attn_implementation = "lowbit"
    return probe


def _stand_in(layer: nn.Module | None, result: Tensor, calls: list[_Call]) -> Callable[..., Tensor]:
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
