# SPDX-License-Identifier: Apache-2.0
"""A transformers decoder that runs all of its layers in one call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lowbit.models.fused_layer import FusedDecoderLayer, as_returned, cache_of, in_one_call
from lowbit.models.layer_joins import MASKS
from lowbit.models.steps import KeptPrograms
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, named, probe_of, with_children

_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")
_NOT_HANDED_ON = "fuse: the model does not hand the result of each layer to the next, as it did when it was fused"
_SHARED = (*MASKS, "position_embeddings")


class FusedStack(Fused):
    """A module of fused layers, made in place by `lowbit.fuse`. Its forward computes all layers in one call, when
    the last layer is called."""

    compute: ClassVar[Callable[..., Tensor | None]]
    """The function that computes several layers, with the arguments of `in_one_call`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        layers = facts["layers"]
        own = self.training or is_traced() or any(kwargs.get(name) for name in _RECORDED)
        if own or not self.hands_on(layers):  # Models may skip layers in training.
            return super().forward(*args, **kwargs)
        joined = JoinedLayers(layers, facts, self.compute)
        twin = with_children(self, **{facts["list"]: joined.stand_ins()})
        result = super(FusedStack, twin).forward(*args, **kwargs)
        joined.end()
        return result

    def hands_on(self, layers: tuple[Fused, ...]) -> bool:
        """Whether the module still calls these layers in this order and records none of their results."""
        modules, config = self._modules[self.facts["list"]]._modules, self.config
        same = len(modules) == len(layers) and all(map(is_, modules.values(), layers))
        same = same and depth_of(self) == self.facts["depth"]
        return same and not any(getattr(config, name, False) for name in _RECORDED)


class FusedDecoder(FusedStack):
    """A decoder of fused layers."""

    compute = staticmethod(in_one_call)


def stand_ins(call: Callable[..., Tensor], layers: Sequence[nn.Module]) -> tuple[_StandIn, ...]:
    """Return a stand-in for each layer, which calls ``call`` with the layer as its first argument."""
    return tuple(map(_StandIn, repeat(call), layers))


class _StandIn(functools.partial):
    """A function with a layer bound as its first argument. It has the attributes of the layer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args[0], name)


class JoinedLayers:
    """All layers of one forward, computed in one call. The stand-in of each layer stores its arguments, and the last
    one computes the result of all layers.

    Args:
        layers: the layers in the order of their calls; the model passes the output of each to the next.
        facts: what is known of the model, for ``compute``.
        compute: the function that computes them, with the arguments of `in_one_call`.
    """

    def __init__(self, layers: Sequence[Fused], facts: dict[str, Any], compute: Callable[..., Tensor | None]) -> None:
        self.layers, self.facts, self._compute = layers, facts, compute
        self._calls: list[tuple[Fused, Tensor, dict[str, Any]]] = []
        self._behind = facts.get("behind", [None] * len(layers))  # a layer may have become float since

    def stand_ins(self) -> tuple[_StandIn, ...]:
        """Return the stand-ins that the model calls instead of its layers."""
        return stand_ins(self._call, self.layers)

    def end(self) -> None:
        """Raise a RuntimeError if only some of the layers were called."""
        if self._calls:
            raise RuntimeError(_NOT_HANDED_ON)

    def _call(self, layer: Fused, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Return a meta tensor as the input of the next layer, or the output of all layers if this is the last, as the
        layer returns it."""
        calls = self._calls
        if args:
            kwargs |= named(layer, args)
        if not calls:
            self._between = torch.empty_like(x, device="meta")
        calls.append((layer, x, kwargs))
        behind = self._behind[len(calls) - 1]  # `_result` of the last call empties them
        return as_returned(self._between if len(calls) < len(self.layers) else self._result(), behind)

    def _result(self) -> Tensor:
        layers, between = self.layers, repeat(self._between)
        called, given, calls = zip(*self._calls, strict=True)
        self._calls = []
        if not (all(map(is_, called, layers)) and all(map(is_, given[1:], between))):
            raise RuntimeError(_NOT_HANDED_ON)
        y = self._compute(layers, self.facts, given[0], calls)
        if y is None:
            y = given[0]
            for layer, kwargs, behind in zip(layers, calls, self._behind, strict=True):
                y = layer(y, **kwargs)
                y = y if behind is None else y[0]
        return y


def has_fused_layers(module: nn.Module) -> bool:
    """Whether the module has a list of two or more layers, all of them fused."""
    layers = list(module._modules.get("layers", nn.ModuleList())._modules.values())  # repeated layers included
    return len(layers) > 1 and all(isinstance(layer, FusedDecoderLayer) for layer in layers)


def fuse_decoder(module: nn.Module) -> str:
    """Fuse ``module``, whose ``layers`` are already fused, or return the reason why it stays unchanged.

    Two probe calls, in which each layer returns a random tensor, show whether the module only passes the output of each
    layer to the next, with the same cache. Layers with the same mask and rotary embedding are of one kind.
    """
    layers = tuple(module.layers)
    kept = [mixer.layer_idx for layer in layers for mixer in layer.facts["mixers"][:1]]
    if len(set(kept)) < len(kept):
        return "two of its layers write to one layer of the cache (layer_idx)"
    if len({layer.facts["reads"] for layer in layers}) > 1:
        return "its layers have different names for their arguments"
    kinds = _kinds_if_only_handing_on(module, layers)
    if kinds is None:
        return "it does not hand one cache and the result of each layer to the next"
    attention = next((each for layer in layers if (each := layer.facts["attention"]) is not None), None)
    FusedDecoder.take(
        module,
        {
            "layers": layers,
            "list": "layers",
            "depth": depth_of(module),
            "kinds": kinds,
            "reads": layers[0].facts["reads"],
            "attention": attention,
            "limited": [mixer for layer in layers for mixer in layer.facts["limited"]],
            "behind": [layer.facts["joins"].behind for layer in layers],
            "kept": KeptPrograms(),
        },
    )
    return ""


@torch.no_grad()
def _kinds_if_only_handing_on(module: nn.Module, layers: tuple[nn.Module, ...]) -> tuple[int, ...] | None:
    """Return the kind of each layer, or None if the module does more than pass outputs on. The probe has padding,
    because models create no mask without it, even if their layers have windows."""
    hidden = hidden_of(layers)
    generator = torch.Generator("cpu").manual_seed(0)
    x, last, *others = torch.randn(2 * len(layers), 1, 3, hidden, generator=generator, device="cpu")
    first, second = others[: len(layers) - 1], others[len(layers) - 1 :]
    results, calls = _called(module, x, layers, [*first, last])
    again, _ = _called(module, x, layers, [*second, last])
    if len(calls) != len(layers) or not results.numel() or not results.equal(again):
        return None
    handed, cache = [calls[0][1], *first], calls[0][2][-1]
    numbers: dict[tuple[int, ...], int] = {}
    kinds = []
    for (called, given, shared), layer, of in zip(calls, layers, handed, strict=True):
        *of_kind, of_layer = shared
        masked = of_kind[0] is not None or not layer.facts["mixers"]
        if called is not layer or not given.equal(of) or not masked or of_layer is None or of_layer is not cache:
            return None
        kinds.append(numbers.setdefault(tuple(map(id, of_kind)), len(numbers)))  # `calls` keeps the ids valid
    return tuple(kinds)


def depth_of(module: nn.Module) -> int | None:
    """Return the number of layers in the model's configuration; of an encoder-decoder model, it is the encoder's."""
    return getattr(module.config, "num_hidden_layers", None)


def hidden_of(layers: Sequence[nn.Module]) -> int:
    """Return the number of columns of the residual stream."""
    return layers[0].facts["hidden"]


_Call = tuple[Any, Tensor, tuple[Any, ...]]
"""The layer that was called, its input, and a tuple of its masks, rotary embedding and cache."""


def _called(
    module: nn.Module, x: Tensor, layers: tuple[nn.Module, ...], results: list[Tensor]
) -> tuple[Tensor, list[_Call]]:
    """Call the module with layers that return their entries of ``results``, and return its result and the calls."""
    calls, same = list[_Call](), list[bool]()
    of_layers = dict(zip(layers, results, strict=True))

    def call(layer: nn.Module, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        given, reads = kwargs | named(layer, args), layer.facts["reads"]
        first, index = given.get(reads.first, calls[0][1] if calls else x), given.get(reads.index, len(calls))
        same.append(index == len(calls) and first.equal(calls[0][1] if calls else x))
        usual = reads.named(given)
        calls.append((layer, x, (*(usual.get(name) for name in _SHARED), cache_of(usual))))
        return as_returned(of_layers[layer], layer.facts["joins"].behind)

    probe = probe_of_stack(module, layers=stand_ins(call, layers))
    before = dict(probe.__dict__)
    result = _result(probe, x)
    kept = before.keys() == probe.__dict__.keys() and all(map(is_, before.values(), probe.__dict__.values()))
    fits = kept and all(same)  # Attributes that were set on the copy would be lost.
    return (result if fits else x.new_empty(0)), calls


def probe_of_stack(module: nn.Module, **children: Any) -> nn.Module:
    """Return a copy of the model for a probe call. It has its own submodules, of which ``children`` replace some, and
    its own configuration, which selects lowbit's attention."""
    own = {name: probe_of(child) for name, child in module._modules.items() if child is not None}
    probe = with_children(probe_of(module, **own), **children)
    probe.config = copy.deepcopy(module.config)
    probe.config._attn_implementation = "lowbit"
    return probe


def _result(probe: nn.Module, x: Tensor) -> Tensor:
    """Return the result of the probe, or an empty tensor if it has another signature."""
    seen = torch.tensor([[0, 1, 1]], device="cpu")
    try:
        return probe(inputs_embeds=x, attention_mask=seen, use_cache=True).last_hidden_state
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):
        return x.new_empty(0)
