# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of transformers that run in one call, because their norms, attention and gated MLP are fused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.models.decoder_pieces import FOUR_NORMS, HALVES, TWO_NORMS
from lowbit.models.half_steps import HALF_STEPS
from lowbit.models.layer_program import LayerProgram
from lowbit.models.lowbit_attention import lowbit_attention, weights_are_recorded
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, has_own_tensors, hooked, is_inference, probe_of
from lowbit.quant.fused_norm import FusedRMSNorm

_OPTIONS = {"scaling", "softcap", "sliding_window"}  # options of attention; the window is in the mask
_READ = {"attention_mask", "position_embeddings", "past_key_values"}
_READ |= {"position_ids", "use_cache", "cache_position"}  # arguments that nothing inside a layer reads
MISSING = torch.empty(0, device="cpu")
"""The mask input of a call without a mask."""
_TOLERANCE = 1e-6  # relative to the largest value: float32 sums
_HIDDEN = (2, 3)  # batch and tokens of the probe


class FusedDecoderLayer(Fused):
    """A decoder layer that runs as one call of the op `run_program`, or as a part of one. `lowbit.fuse` makes it in
    place."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or is_traced():
            return super().forward(hidden_states, *args, **kwargs)
        y = in_one_call((self,), self.facts, hidden_states, (kwargs,))
        return super().forward(hidden_states, **kwargs) if y is None else y


def in_one_call(
    layers: Sequence[FusedDecoderLayer], facts: dict[str, Any], x: Tensor, calls: Sequence[dict[str, Any]]
) -> Tensor | None:
    """Return the result of the last layer, or None if the layers must be called one by one.

    Args:
        layers: the layers in the order of their calls.
        facts: the facts of the module that has these layers. ``kinds`` has one number per layer; layers of one kind get
            the same mask and rotary embedding. ``kept`` is their program.
        x: the input of the first layer.
        calls: the other arguments of each layer.
    """
    if not is_inference(x) or not calls_lowbit_attention(facts["attention"]):
        return None
    program, kinds = facts["kept"], facts["kinds"]
    if not program.serves(x.dtype):
        program = facts["kept"] = LayerProgram(layers, kinds, x.dtype)
    if program.run is None or not (program.merged or x.numel() == x.shape[-1]):
        return None
    inputs, cache = _inputs(x, kinds, calls), calls[0].get("past_key_values")
    places = None if inputs is None else program.places(x, cache)
    if places is None:
        return None
    grown, states, starts = places
    length = x.shape[1]
    if length > 1 and any(start and inputs[3 * kind + 3] is MISSING for kind, start in enumerate(starts)):
        return None
    y = program.run(states, inputs, starts)
    for layer in grown:
        layer.extend(length)
    return y


def _inputs(x: Tensor, kinds: Sequence[int], calls: Sequence[dict[str, Any]]) -> list[Tensor] | None:
    """Return the inputs of the program, or None if the layers have arguments that it does not know."""
    first_calls = dict(zip(reversed(kinds), reversed(calls), strict=True))  # the first of each kind wins
    objects = map(tuple, map(map, repeat(id), map(dict.values, calls)))
    if len(set(zip(kinds, map(tuple, calls), objects, strict=True))) > len(first_calls):  # in C: one for each layer
        return None
    inputs, cache = [x if x.is_contiguous() else x.contiguous()], calls[0].get("past_key_values")
    for kind in range(len(first_calls)):
        call = first_calls[kind]
        mask, embeddings = call.get("attention_mask"), call.get("position_embeddings")
        if embeddings is None or embeddings[0].dim() != 3 or (mask is not None and mask.dim() != 4):
            return None
        if call.get("past_key_values") is not cache or any(call[name] is not None for name in call.keys() - _READ):
            return None
        inputs += (*embeddings, MISSING if mask is None else mask)
    return inputs


def calls_lowbit_attention(attention: nn.Module) -> bool:
    """Whether the model now uses lowbit's attention and records no attention weights."""
    function = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
    return function is lowbit_attention and not weights_are_recorded(attention)


def fuse_decoder_layer(module: nn.Module) -> str:
    """Fuse ``module``, a layer whose pieces are fused already, or return the reason why it stays unchanged.

    A probe call, in which each piece returns a random tensor, shows how the layer connects its pieces.
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
            "kinds": (0,),
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
    """Whether the layer passes each piece the same input as the op does, and has the same result."""
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
    """Return the input of each piece when the pieces return their entries of ``results``, and the layer's ``result``;
    an empty dictionary if the layer takes other arguments."""
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
