# SPDX-License-Identifier: Apache-2.0
"""The decoder of a language model of transformers, with all of its layers in one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.integrations.fused_layer import FusedDecoderLayer, in_one_call
from lowbit.integrations.layer_weights import LayerWeights
from lowbit.quant.fused import Fused, hooked, probed

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
        return same and isinstance(now, FusedLayers) and not config.output_hidden_states and not hooked(now, modules)


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
    FusedLayers.take(module.layers, {})
    if not _only_hands_on(module, layers):
        module.layers.give_back()
        return "it does not hand one mask, rotary embedding and cache through all layers"
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
    stand_ins = {layer: _stand_in(layer, result, calls) for layer, result in zip(layers, results, strict=True)}
    return _result(module, x, stand_ins), calls


def _called_as_one(module: nn.Module, x: Tensor, result: Tensor) -> tuple[Tensor, list[_Call]]:
    """The same where the list of layers is one item."""
    calls: list[_Call] = []
    with _Pass(module.layers, _stand_in(None, result, calls)):
        return _result(module, x), calls


def _stand_in(layer: nn.Module | None, result: Tensor, calls: list[_Call]) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        calls.append((layer, hidden_states, tuple(kwargs.get(name) for name in _SHARED)))
        return result

    return forward


def _result(module: nn.Module, x: Tensor, forwards: Mapping[nn.Module, Callable[..., Any]] | None = None) -> Tensor:
    """The result of the module; empty where it takes other arguments."""
    seen = torch.tensor([[0, 1, 1]], device="cpu")
    config = module.config
    implementation, config._attn_implementation = config._attn_implementation, "lowbit"
    try:
        with probed(module, forwards):
            return module(inputs_embeds=x, attention_mask=seen, use_cache=True).last_hidden_state
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):
        return x.new_empty(0)
    finally:
        config._attn_implementation = implementation
