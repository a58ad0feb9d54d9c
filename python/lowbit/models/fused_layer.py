# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of transformers that run in one call, because their norms, attention and gated MLP are fused."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import repeat
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.models.decoder_pieces import HALVES
from lowbit.models.document_mask import DocumentMask
from lowbit.models.fused_attention import IDLE, FusedAttention, pair_of, whole_columns
from lowbit.models.fused_latent_attention import FusedLatentAttention
from lowbit.models.fused_mamba2 import NO_LIMIT, FusedMamba2
from lowbit.models.fused_mixture import FusedMixture
from lowbit.models.fused_self_attention import FusedSelfAttention
from lowbit.models.half_steps import HALF_STEPS
from lowbit.models.latent_states import FEW
from lowbit.models.layer_joins import MASKS, OF_ALL_LAYERS, USUAL, Reads, joins_of
from lowbit.models.layer_program import NORMS, LayerProgram
from lowbit.models.lowbit_attention import lowbit_attention, weights_are_recorded
from lowbit.models.recurrent_steps import RECURRENT_STEPS, why_no_steps
from lowbit.models.shared_block import FusedSharedAttention
from lowbit.models.steps import MISSING, KeptPrograms
from lowbit.ops.tracing import is_traced
from lowbit.quant.fused import Fused, arguments_of, has_own_tensors, hooked, is_inference
from lowbit.quant.unchanged import Attributes

_RECORDS = {"output_router_logits", "output_attentions", "output_hidden_states"}
"""Arguments that models pass on. If one is true, results inside of the layers are recorded."""
_SECOND_HALVES = ("mlp", "block_sparse_moe", "feed_forward", "moe")
"""Names of the half behind attention."""
OPTIONS = {"scaling", "softcap", "sliding_window", "deterministic"}
"""Options of attention that steps serve: the window is in the mask, and every result is deterministic."""
_ATTENTION = (FusedAttention, FusedLatentAttention)
_MIXERS = (*_ATTENTION, *RECURRENT_STEPS)
"""The classes of modules that mix tokens, of which a layer has one, or attention and a recurrent one side by side."""
_LONE_HALF = "mixer"
"""The name of the only half of a layer (Nemotron-H): attention, a recurrent layer or an MLP."""
CACHES = ("past_key_values", "layer_past", "cache_params")
"""The arguments that may be the cache."""
_READ = {"attention_mask", "position_embeddings", *CACHES}
_READ |= {"position_ids", "use_cache", "cache_position", "return_dict"}  # nothing in a layer reads these


class FusedDecoderLayer(Fused):
    """A decoder layer that runs as one call of the op `run_program`, or as a part of one. `lowbit.fuse` makes it in
    place."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        facts = self.facts
        if args or is_traced() or facts["reads"].first:  # which a call of one layer need not have as its input
            return super().forward(hidden_states, *args, **kwargs)
        y = in_one_call((self,), facts, hidden_states, (kwargs,))
        return super().forward(hidden_states, **kwargs) if y is None else as_returned(y, facts["joins"].behind)


def as_returned(y: Tensor, behind: tuple[Any, ...] | None) -> Any:
    """Return what a layer returns whose result is y: y, or a tuple of y and what is ``behind`` it."""
    return y if behind is None else (y, *behind)


def in_one_call(
    layers: Sequence[Fused],
    facts: dict[str, Any],
    x: Tensor,
    calls: Sequence[dict[str, Any]],
    of_encoder: Callable[[], tuple[list[Tensor], Tensor]] | None = None,
) -> Tensor | None:
    """Return the output of the last layer, or None if the layers must be called one by one.

    Args:
        layers: the layers in the order of their calls.
        facts: what is known of the module that has these layers. ``kinds`` has one number per layer: layers of one kind
            get the same mask and rotary embedding. ``kept`` are their programs.
        x: the input of the first layer.
        calls: the other arguments of each layer.
        of_encoder: returns the keys and values of the cross attention of each layer, and its mask. It is called when
            nothing can rule the call out any more, because it may write to a cache.
    """
    if not is_inference(x) or not calls_lowbit_attention(facts["attention"]):
        return None
    if x.shape[1] > FEW and isinstance(facts["attention"], FusedLatentAttention):
        return None  # the modules project keys, which is faster for so many queries
    reads = facts.get("reads", USUAL)
    if reads.first:
        calls = [*map(reads.named, calls)]
    kinds, dtype, crosses, cache = facts["kinds"], x.dtype, of_encoder is not None, cache_of(calls[0])
    of_token = _is_token(x, facts.get("limited", ()), cache)
    if of_token is None:
        return None
    program = facts["kept"].serving(
        lambda kept: kept.serves(dtype, of_token),
        lambda: LayerProgram(layers, kinds, dtype, crosses=crosses, of_token=of_token),
    )
    if program.run is None or not (program.merged or x.numel() == x.shape[-1]):
        return None
    inputs = inputs_of(x, kinds, calls, program.rotates, program.half_rotary, program.recurrent)
    places = None if inputs is None else program.places(x, cache)
    if places is None:
        return None
    grown, states, starts = places
    length = x.shape[1]
    if length > 1 and any(start and inputs[3 * kind + 3] is MISSING for kind, start in enumerate(starts)):
        return None
    if of_encoder is not None:
        more, mask = of_encoder()
        states, inputs = states + more, [*inputs, mask]
    y = program.run(states, inputs if crosses else inputs[: program.inputs], starts)
    for layer in grown:
        layer.extend(length)
    return y


def cache_of(call: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a layer."""
    return next((cache for name in CACHES if (cache := call.get(name)) is not None), None)


def _is_token(x: Tensor, limited: Sequence[Any], cache: Any) -> bool | None:
    """Whether x is one token behind others for the mixers that limit steps of time; None if it is for some of them."""
    if not limited or x.shape[1] > 1 or cache is None:
        return False
    found = {cache.get_recurrent_state(mixer.layer_idx) is not None for mixer in limited}
    return found.pop() if len(found) == 1 else None


def inputs_of(
    x: Tensor,
    kinds: Sequence[int],
    calls: Sequence[dict[str, Any]],
    rotates: bool,
    half_rotary: bool,
    recurrent: Container[int] = (),
) -> list[Tensor] | None:
    """Return the inputs of the program, or None if the layers have arguments that it does not support.

    ``recurrent`` are the kinds whose mask ``[B, L]`` is that of padding. Those of recurrent layers beside attention are
    behind the others, and have the second of the masks of their layer."""
    first_calls = dict(zip(reversed(kinds), reversed(calls), strict=True))  # the first call of each kind
    objects = map(tuple, map(map, repeat(id), map(dict.values, calls)))
    # A loop in C, because this runs for every token and has an entry per layer.
    if len(set(zip(kinds, map(tuple, calls), objects, strict=True))) > len(first_calls):
        return None
    inputs, cache, count = [x if x.is_contiguous() else x.contiguous()], cache_of(calls[0]), len(first_calls)
    beside = [kind for kind in range(count, 2 * count) if kind in recurrent]
    read = _READ if not beside else _READ | {MASKS[1]}
    for kind in range(2 * count if beside else count):
        call = first_calls[kind % count]
        mask, embeddings = call.get(MASKS[kind >= count]), pair_of(call.get("position_embeddings"))
        if kind in recurrent or (embeddings is None and not rotates):
            embeddings = (MISSING, MISSING)
        elif embeddings is None or embeddings[0].dim() != 3:
            return None
        if cache_of(call) is not cache:
            return None
        if mask is not None and kind in recurrent:
            if mask.shape != x.shape[:2]:
                return None
            mask = mask.to(x.dtype)[:, :, None].contiguous()
        elif mask is not None and mask.dim() != 4:
            return None
        if type(mask) is DocumentMask:
            mask = mask.read()
        if any(call[name] if name in _RECORDS else call[name] is not None for name in call.keys() - read):
            return None
        if half_rotary and rotates and kind not in recurrent:
            embeddings = whole_columns(embeddings)
        inputs += (*embeddings, MISSING if mask is None else mask)
    return inputs


def calls_lowbit_attention(attention: nn.Module | None) -> bool:
    """Whether the model now uses lowbit's attention and records no attention weights, or has no attention."""
    if attention is None:
        return True
    function = ALL_ATTENTION_FUNCTIONS.get(attention.config._attn_implementation)
    return function is lowbit_attention and not weights_are_recorded(attention)


def may_be_layer(module: nn.Module) -> bool:
    """Whether the module may be a decoder layer: it has attention or a recurrent layer that is fused, or the names of
    one, or it is a half."""
    children = module._modules.values()
    if any(isinstance(child, FusedSharedAttention) for child in children):
        return False  # a block, which is a part of the layers that share it
    causal = any(isinstance(child, FusedSelfAttention) and child.is_causal for child in children)
    half = isinstance(module._modules.get(_LONE_HALF), tuple(HALF_STEPS))
    return bool(halves_of(module)) or causal or half or any(isinstance(child, _MIXERS) for child in children)


def fuse_decoder_layer(module: nn.Module) -> str:
    """Fuse ``module``, a layer whose submodules are already fused, or return the reason why it stays unchanged.

    A probe call, in which each submodule returns a random tensor, shows how the layer connects them.
    """
    children = {name: child for name, child in module._modules.items() if child is not None}
    pieces = {name: child for name, child in children.items() if isinstance(child, (*HALF_STEPS, *NORMS))}
    idle = [name for name, child in children.items() if type(child) in IDLE]
    problem = _problem(module, children, pieces, idle)
    if problem:
        return problem
    mixers = {name: child for name, child in pieces.items() if isinstance(child, _MIXERS)}
    attention = next((child for child in mixers.values() if isinstance(child, _ATTENTION)), None)
    reads = reads_of(module)
    sides = len(mixers) > 1 or bool(reads.first)
    recurrent = tuple(name for name, child in mixers.items() if child is not attention)
    halves = tuple(name for name, piece in pieces.items() if _returns_more(piece))
    hidden = next((child.facts["hidden"] for child in mixers.values()), None) or _width_of(pieces.values())
    joins = joins_of(module, tuple(pieces), halves, hidden, padded=recurrent if sides else (), reads=reads)
    if joins is None:
        return "it does not join its pieces as a decoder layer does"
    FusedDecoderLayer.take(
        module,
        {
            "pieces": list(pieces.items()),
            "containers": [("", Attributes(module, without=("training", "facts")))],
            "activations": {},
            "arguments": arguments_of(module) if reads.first else (),
            "reads": reads,
            "mixers": [*mixers.values()],
            "sides": sides,
            "limited": [mixer for mixer in mixers.values() if limits_of(mixer)],
            "hidden": hidden,
            "attention": attention,
            "idle": idle,
            "joins": joins,
            "kinds": (0,),
            "kept": KeptPrograms(),
        },
    )
    return ""


def halves_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of attention and of the half behind it, or an empty tuple if the module is no decoder layer."""
    second = next((name for name in _SECOND_HALVES if name in module._modules), None)
    return (HALVES[0], second) if second is not None and HALVES[0] in module._modules else ()


def reads_of(module: nn.Module) -> Reads:
    """Return the names of the arguments of a layer."""
    names = {*OF_ALL_LAYERS.masks, OF_ALL_LAYERS.first, OF_ALL_LAYERS.index}
    return OF_ALL_LAYERS if names.issubset(arguments_of(module)) else USUAL


def limits_of(mixer: nn.Module) -> bool:
    """Whether a mixer limits its steps of time."""
    return isinstance(mixer, FusedMamba2) and mixer.facts["limit"] != NO_LIMIT


def _width_of(pieces: Iterable[nn.Module]) -> int:
    """Return the number of columns of the stream of a layer that has a norm and an MLP."""
    return next((piece.weight.numel() for piece in pieces if isinstance(piece, NORMS) and piece.weight is not None), 0)


def _returns_more(piece: nn.Module) -> bool:
    return isinstance(piece, _ATTENTION) or (isinstance(piece, FusedMixture) and piece.facts["returns_more"])


def _problem(module: nn.Module, children: dict[str, nn.Module], pieces: dict[str, nn.Module], idle: list[str]) -> str:
    mixers = [(name, child) for name, child in pieces.items() if isinstance(child, _MIXERS)]
    for name, mixer in mixers:
        if isinstance(mixer, tuple(RECURRENT_STEPS)) and (reason := why_no_steps(mixer)):
            return f"of its {name}: {reason}"
        if isinstance(mixer, FusedLatentAttention) and mixer.facts["no_steps"]:
            return f"of its {name}, latent attention: {mixer.facts['no_steps']}"
    if left := [name for name in children if name not in pieces and name not in idle]:
        known = [name for name in left if name in (HALVES[0], _LONE_HALF, *_SECOND_HALVES) or "norm" in name]
        return f"its {known[0]} is not fused" if known else f"it has {', '.join(sorted(left))}"
    attentions = sum(isinstance(mixer, _ATTENTION) for _, mixer in mixers)
    fewest = 0 if _LONE_HALF in pieces else 1
    if attentions > 1 or not fewest <= len(mixers) <= attentions + 1:
        return f"it has {len(mixers)} attentions or recurrent layers"
    if len({mixer.layer_idx for _, mixer in mixers}) > 1:
        return "its attention and its recurrent layer write to two layers of the cache (layer_idx)"
    if has_own_tensors(module):
        return "it has parameters of its own"
    if unknown := {option for _, mixer in mixers for option in mixer.facts.get("options", ())} - OPTIONS:
        return f"its attention has the option {', '.join(sorted(unknown))}"
    hook = hooked(module, children)
    return f"hooks on {hook}" if hook else ""
