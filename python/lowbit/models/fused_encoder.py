# SPDX-License-Identifier: Apache-2.0
"""A transformers encoder that runs all of its layers in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.fused_decoder import FusedStack, depth_of, hidden_of, probe_of_stack, stand_ins
from lowbit.models.fused_encoder_layer import FusedEncoderLayer, encoded
from lowbit.models.fused_layer import cache_of
from lowbit.models.steps import KeptPrograms
from lowbit.quant.fused import Fused, named

_LISTS = ("layer", "layers")
"""Names of the list of layers."""
_PROBED = 7  # number of tokens in the probe


class FusedEncoder(FusedStack):
    """An encoder of fused layers, or a whole encoder model that has the list of them."""

    compute = staticmethod(encoded)


def list_of_encoder_layers(module: nn.Module) -> str:
    """Return the name of the module's list of two or more layers, all of them fused, or an empty string."""
    return list_of_layers(module, FusedEncoderLayer)


def list_of_layers(module: nn.Module, kind: type[Fused]) -> str:
    """Return the name of the module's list of two or more layers, all of this kind, or an empty string."""
    for name in _LISTS:
        layers = list(module._modules.get(name, nn.ModuleList())._modules.values())
        if len(layers) > 1 and all(isinstance(layer, kind) for layer in layers):
            return name
    return ""


def fuse_encoder(module: nn.Module) -> str:
    """Fuse ``module``, whose list of layers is already fused, or return the reason why it stays unchanged.

    Two probe calls, in which each layer returns a random tensor, show whether the module only passes the output of each
    layer to the next. Layers with the same mask, rotary embedding and window are of one kind.
    """
    return fuse_stack(module, FusedEncoder, list_of_encoder_layers(module), _CALLS, _without_cache)


def fuse_stack(
    module: nn.Module,
    cls: type[FusedStack],
    name: str,
    calls: Sequence[Call],
    common: Callable[[dict[str, Any]], tuple[Any, ...] | None],
) -> str:
    """Fuse ``module``, whose list ``name`` has fused layers, or return the reason why it stays unchanged.

    Args:
        cls: the class that it becomes.
        calls: functions that call a module of this sort with an input of its layers; the first that fits is taken.
        common: returns the arguments of a layer that must be the same for all, or None if the layers are refused.
    """
    layers = tuple(module._modules[name]._modules.values())
    if len(set(map(id, layers))) < len(layers):
        return "it calls one of its layers twice"
    kinds = next(filter(None, (_kinds(module, name, layers, call, common) for call in calls)), None)
    if kinds is None:
        return "it does not hand the result of each layer to the next"
    windows = dict(zip(kinds, (layer.facts["windows"][0] for layer in layers), strict=True))
    cls.take(
        module,
        {
            "layers": layers,
            "list": name,
            "depth": depth_of(module),
            "kinds": kinds,
            "windows": tuple(windows.values()),
            "attention": layers[0].facts["attention"],
            "kept": KeptPrograms(),
        },
    )
    return ""


def _without_cache(call: dict[str, Any]) -> tuple[Any, ...] | None:
    return () if cache_of(call) is None else None


def _of_layers(probe: nn.Module, x: Tensor) -> Any:
    """Call a module that gets masks and hands them on, as BERT's encoder."""
    seen = torch.ones(1, 1, _PROBED, _PROBED, dtype=torch.bool, device="cpu")
    return probe(x, attention_mask=seen)


def _of_model(probe: nn.Module, x: Tensor) -> Any:
    """Call a model that makes the masks, as ModernBERT's."""
    seen = torch.ones(1, _PROBED, dtype=torch.long, device="cpu")
    seen[0, -1] = 0  # models create no mask without padding
    return probe(inputs_embeds=x, attention_mask=seen)


def _of_hidden(probe: nn.Module, x: Tensor) -> Any:
    """Call a module that knows no masks."""
    return probe(x)


def _of_sound(probe: nn.Module, x: Tensor) -> Any:
    """Call Whisper's encoder, whose layers are called behind convolutions, with as many frames as it takes."""
    frames = probe.config.max_source_positions * probe.conv1.stride[0] * probe.conv2.stride[0]
    return probe(x.new_zeros(1, probe.config.num_mel_bins, frames))


def _of_image(probe: nn.Module, x: Tensor) -> Any:
    """Call a model that cuts images into patches, as ViT."""
    sides = probe.config.image_size
    height, width = (sides, sides) if isinstance(sides, int) else sides
    return probe(x.new_zeros(1, probe.config.num_channels, height, width))


Call = Callable[[nn.Module, Tensor], Any]
_CALLS: tuple[Call, ...] = (_of_layers, _of_model, _of_hidden, _of_sound, _of_image)


@torch.no_grad()
def _kinds(
    module: nn.Module,
    name: str,
    layers: Sequence[Fused],
    call: Call,
    common: Callable[[dict[str, Any]], tuple[Any, ...] | None],
) -> tuple[int, ...] | None:
    """Return the kind of each layer, or None if the module does more than pass outputs on, or has another signature."""
    generator = torch.Generator("cpu").manual_seed(0)
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
    random = torch.randn(2 * len(layers), 1, _PROBED, hidden_of(layers), generator=generator, device="cpu")
    x, last, *others = random.to(dtype)
    first, second = others[: len(layers) - 1], others[len(layers) - 1 :]
    result, calls = _called(module, name, layers, x, [*first, last], call)
    again, _ = _called(module, name, layers, x, [*second, last], call)
    if result is None or again is None or len(calls) != len(layers) or not result.equal(again):
        return None
    numbers: dict[tuple[Any, ...], int] = {}
    kinds, shared = [], common(calls[0][2])
    for (called, given, by_name), layer, of in zip(calls, layers, [calls[0][1], *first], strict=True):
        if called is not layer or not given.equal(of) or shared is None:
            return None
        now = common(by_name)
        if now is None or len(now) != len(shared) or not all(map(is_, now, shared)):
            return None
        key = id(by_name.get("attention_mask")), id(by_name.get("position_embeddings")), layer.facts["windows"]
        kinds.append(numbers.setdefault(key, len(numbers)))  # `calls` keeps the ids valid
    return tuple(kinds)


_Call = tuple[nn.Module, Tensor, dict[str, Any]]
"""The layer that was called, its input, and its other arguments."""


def _called(
    module: nn.Module,
    name: str,
    layers: Sequence[Fused],
    x: Tensor,
    results: list[Tensor],
    call: Call,
) -> tuple[Tensor | None, list[_Call]]:
    """Call the module with layers that return their entries of ``results``, and return its result and the calls."""
    calls: list[_Call] = []
    of_layers = dict(zip(layers, results, strict=True))

    def stand_in(layer: Fused, x: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((layer, x, kwargs | named(layer, args)))
        return of_layers[layer]

    probe = probe_of_stack(module, **{name: stand_ins(stand_in, layers)})
    before = dict(probe.__dict__)
    try:
        result = call(probe, x)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError):  # another signature
        return None, calls
    result = result[0] if isinstance(result, tuple) else getattr(result, "last_hidden_state", None)
    kept = before.keys() == probe.__dict__.keys() and all(map(is_, before.values(), probe.__dict__.values()))
    return (result if kept else None), calls  # Attributes that were set on the copy would be lost.
