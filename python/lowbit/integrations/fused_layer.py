# SPDX-License-Identifier: Apache-2.0
"""Layers of transformers' decoders in one call, where all of their pieces are fused: norms, attention, gated MLP."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.integrations.decoder_pieces import FOUR_NORMS, HALVES, TWO_NORMS
from lowbit.integrations.growing_cache import growing_layers
from lowbit.integrations.half_steps import HALF_STEPS
from lowbit.integrations.layer_program import LayerProgram
from lowbit.integrations.lowbit_attention import lowbit_attention, weights_are_recorded
from lowbit.quant.fused import Fused, has_own_tensors, hooked, is_inference, probe_of
from lowbit.quant.fused_norm import FusedRMSNorm

_OPTIONS = {"scaling", "softcap", "sliding_window"}  # of attention; the window is in the mask
_READ = {"attention_mask", "position_embeddings", "past_key_values"}
_READ |= {"position_ids", "use_cache", "cache_position"}  # these nothing inside a layer reads
_NOT_HANDED_ON = "fuse: the model does not hand the result of each layer to the next, as it did when it was fused"
_MISSING = torch.empty(0, device="cpu")
"""Stands for a mask that is not given."""
_is_compiling = torch.compiler.is_compiling
_TOLERANCE = 1e-6  # of the largest value: sums of float32
_HIDDEN = (2, 3)  # batch and tokens of the probe


class FusedDecoderLayer(Fused):
    """A decoder layer as one call of the op, or as a part of one; made in place by `lowbit.fuse`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # On joined layers no hooks wait: torch's own way to `forward` takes as long as all else here.
        joined = _running.layers
        if joined is None or len(args) != 1:
            return super().__call__(*args, **kwargs)
        return joined.call(self, args[0], kwargs)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or _is_compiling():
            return super().forward(hidden_states, *args, **kwargs)
        y = in_one_call((self,), (0,), self.facts, hidden_states, (kwargs,))
        return super().forward(hidden_states, **kwargs) if y is None else y


class JoinedLayers:
    """The layers of a model that hands the result of each to the next, in one call: while it is entered, a layer notes
    its arguments, and the last one computes them all. In this thread alone.

    Args:
        layers: in the order of their calls.
        kinds: a number for each; layers of one get the same mask and rotary embedding.
        facts: of the model, which keeps the program.
    """

    def __init__(self, layers: Sequence[FusedDecoderLayer], kinds: Sequence[int], facts: dict[str, Any]) -> None:
        self.layers, self.kinds, self.facts = layers, kinds, facts
        self.calls: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        self._outer, _running.layers = _running.layers, self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        _running.layers = self._outer
        if error is None and self.calls:
            raise RuntimeError(_NOT_HANDED_ON)

    def call(self, layer: FusedDecoderLayer, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The result of a layer: a tensor without data, for the next one to be given, or that of all. A layer that
        another thread turns back meanwhile fails with it, before it writes to a cache."""
        calls, layers = self.calls, self.layers
        if layer is not layers[len(calls)] or (calls and x is not self.between):
            raise RuntimeError(_NOT_HANDED_ON)
        if not calls:
            self.x, self.between = x, torch.empty_like(x, device="meta")
        calls.append(kwargs)
        if len(calls) < len(layers):
            return self.between
        x, self.calls = self.x, []
        with _Apart():
            y = in_one_call(layers, self.kinds, self.facts, x, calls)
            if y is None:
                y = x
                for layer, kwargs in zip(layers, calls, strict=True):
                    y = layer(y, **kwargs)
        return y


class _Running(threading.local):
    """The layers that this thread calls as one."""

    layers: JoinedLayers | None = None


class _Apart:
    """While it is entered, each layer is a call of its own."""

    def __enter__(self) -> None:
        self._outer, _running.layers = _running.layers, None

    def __exit__(self, *_: Any) -> None:
        _running.layers = self._outer


_running = _Running()


def in_one_call(
    layers: Sequence[FusedDecoderLayer],
    kinds: Sequence[int],
    facts: dict[str, Any],
    x: Tensor,
    calls: Sequence[dict[str, Any]],
) -> Tensor | None:
    """The result of layers, each with the arguments of its call; None where they have to be called one by one.
    ``facts``, of the layer or the model that always has these layers, keeps their program."""
    if not is_inference(x) or not _calls_lowbit_attention(layers[0].facts["attention"]):
        return None
    program = facts["kept"]
    if not program.serves(x.dtype):
        program = facts["kept"] = LayerProgram(layers, kinds, x.dtype)
    if program.run is None or not (program.merged or x.numel() == x.shape[-1]):
        return None
    inputs, cache, length = _inputs(x, kinds, calls), calls[0].get("past_key_values"), x.shape[1]
    attentions = [layer._modules["self_attn"] for layer in layers]
    grown = attentions if cache is None else growing_layers(cache, [attention.layer_idx for attention in attentions])
    if inputs is None or grown is None or len(set(map(id, grown))) < len(grown):  # one would write behind another
        return None
    states, starts = [], {}
    for attention, layer, kind in zip(attentions, grown, kinds, strict=True):
        place = attention.new_place(x) if cache is None else attention.place_behind(layer, x)
        if place is None:
            return None
        keys, values, start = place
        states += (keys, values)
        if starts.setdefault(kind, start) != start:
            return None
    in_order = [starts[kind] for kind in range(len(starts))]
    if length > 1 and any(start and inputs[3 * i + 3] is _MISSING for i, start in enumerate(in_order)):
        return None
    y = program.run(states, inputs, in_order)
    if cache is not None:
        for layer in grown:
            layer.extend(length)
    return y


def _inputs(x: Tensor, kinds: Sequence[int], calls: Sequence[dict[str, Any]]) -> list[Tensor] | None:
    """The inputs of the program, or None where the layers have arguments that it does not know."""
    inputs, firsts = [x if x.is_contiguous() else x.contiguous()], {}
    cache = calls[0].get("past_key_values")
    for kind, call in zip(kinds, calls, strict=True):
        first = firsts.get(kind)
        if first is not None:
            if call.keys() != first.keys() or not all(map(is_, call.values(), first.values())):
                return None
            continue
        firsts[kind] = call
        mask, embeddings = call.get("attention_mask"), call.get("position_embeddings")
        if embeddings is None or embeddings[0].dim() != 3 or (mask is not None and mask.dim() != 4):
            return None
        if call.get("past_key_values") is not cache or any(call[name] is not None for name in call.keys() - _READ):
            return None
        inputs += (*embeddings, _MISSING if mask is None else mask)
    return inputs


def _calls_lowbit_attention(attention: nn.Module) -> bool:
    function = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
    return function is lowbit_attention and not weights_are_recorded(attention)


def fuse_decoder_layer(module: nn.Module) -> str:
    """Fuse ``module``, a layer whose pieces were fused, or return why it stays as it is.

    A call in which each piece returns a tensor of its own shows how the layer joins its pieces.
    """
    problem = _problem(module)
    if problem:
        return problem
    names = FOUR_NORMS if FOUR_NORMS[-1] in module._modules else TWO_NORMS
    if not _joins_as_the_op(module, names):
        return "it does not join its pieces as a decoder layer does"
    FusedDecoderLayer.take(
        module,
        {
            "children": [(name, module._modules[name]) for name in (*HALVES, *names)],
            "attention": module.self_attn,
            "kept": LayerProgram(),
            "norms": names,
        },
    )
    return ""


def _problem(module: nn.Module) -> str:
    children = module._modules
    names = FOUR_NORMS if FOUR_NORMS[-1] in children else TWO_NORMS
    wanted: dict[str, tuple[type[Fused], ...]] = dict.fromkeys(HALVES, tuple(HALF_STEPS))
    wanted |= dict.fromkeys(names, (FusedRMSNorm,))
    for name, pieces in wanted.items():
        if not isinstance(children.get(name), pieces):
            return f"its {name} is not fused"
    if set(children) != set(wanted) or has_own_tensors(module):
        return f"it has {', '.join(sorted(set(children) - set(wanted))) or 'parameters of its own'}"
    if unknown := set(children["self_attn"].facts["options"]) - _OPTIONS:
        return f"its attention has the option {', '.join(sorted(unknown))}"
    hook = hooked(module, children)
    return f"hooks on {hook}" if hook else ""


@torch.no_grad()
def _joins_as_the_op(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether each piece is given what the op gives it, and the result is the op's."""
    generator = torch.Generator("cpu").manual_seed(0)
    hidden = module._modules[names[0]].weight.numel()
    x, *given = torch.randn(1 + len(HALVES) + len(names), *_HIDDEN, hidden, generator=generator, device="cpu")
    results = dict(zip((*HALVES, *names), given, strict=True))
    got = _inputs_of_pieces(module, x, results)
    before, behind, *others = names
    attention, mlp = results["self_attn"], results["mlp"]
    if others:
        after_attention, after_mlp = results[behind], results[others[1]]
        wanted = {behind: attention, others[0]: x + after_attention, others[1]: mlp}
        second = others[0]
    else:
        after_attention, after_mlp, second = attention, mlp, behind
        wanted = {behind: x + attention}
    wanted |= {before: x, "self_attn": results[before], "mlp": results[second]}
    wanted["result"] = x + after_attention + after_mlp
    return got.keys() == wanted.keys() and all(
        got[name].shape == wanted[name].shape
        and bool((got[name] - wanted[name]).abs().max() <= _TOLERANCE * wanted[name].abs().max())
        for name in wanted
    )


def _inputs_of_pieces(module: nn.Module, x: Tensor, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """The input of each piece in a call with ``x`` in which it returns its entry of ``results``; with ``result``."""
    inputs: dict[str, Tensor] = {}

    def stand_in(name: str) -> nn.Module:
        def forward(*args: Tensor, **kwargs: Any) -> Any:
            inputs[name] = args[0] if args else kwargs["hidden_states"]
            return (results[name], None) if name == "self_attn" else results[name]

        piece = probe_of(module._modules[name])
        piece.forward = forward
        return piece

    probe = probe_of(module, **{name: stand_in(name) for name in results})
    try:
        result = probe(x, attention_mask=None, position_embeddings=(x, x), past_key_values=None)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError):  # it takes other arguments
        return {}
    return inputs | {"result": result} if isinstance(result, Tensor) else {}
