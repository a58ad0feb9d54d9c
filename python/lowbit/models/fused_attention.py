# SPDX-License-Identifier: Apache-2.0
"""Fused attention for transformers decoders.

It makes one product for q, k and v, one call for the head norms, the rotary embedding and the write to the cache, and
then a call of the attention function that the model uses.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.models.attention_in_training import may_train, trained_heads
from lowbit.models.attention_probe import agree, recorded, recording_probe, trains_alike
from lowbit.models.decoder_pieces import APART
from lowbit.models.growing_cache import GrowingLayer, GrowingSlidingLayer, new_tokens
from lowbit.models.hybrid_cache import growing_layer
from lowbit.ops.rope_append import HALVES, NEIGHBOURS, NEIGHBOURS_OF_HALVES, rope_append
from lowbit.quant.fused import Fused, hooked, is_inference, not_packed
from lowbit.quant.fused_norm import norm_facts, said_eps
from lowbit.quant.lora_layers import base_of, is_product
from lowbit.quant.merged import MergedLinear
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes

_SINK = "s_aux"
"""The option of attention functions that is a parameter of the module (gpt-oss)."""
_PROBED = 3  # number of tokens in the probe
_PACKED = ("qkv_proj", "query_key_value", "Wqkv", "wqkv")
_OUT = ("o_proj", "dense", "out_proj", "wo", "Wo")
_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))
_ROTATIONS = (HALVES, NEIGHBOURS, NEIGHBOURS_OF_HALVES)
IDLE = (nn.Dropout, nn.Identity)
"""Modules that do nothing outside of training."""
READ_NOW = {"config", "facts", "is_causal", "layer_idx", "training"}  # attributes that are read in each call


class AttentionPiece(Fused):
    """An attention module of transformers whose projections are one product."""

    def projections(self) -> list[nn.Module] | None:
        """Return the q, k and v layers, each a `QuantLinear` or LoRA over one, or None if one is another layer or has a
        hook, or if the scale, the softcap or an eps has changed since the module was fused."""
        facts = self.facts
        names = facts["projections"]
        if hooked(self, (*names, *facts["norm_names"])) or not facts["noted"].hold(self):
            return None
        of_norms = zip(facts["norm_names"], facts["norms"], facts["said"], strict=True)
        for name, norm, said in of_norms:
            if self._modules[name] is not norm or said_eps(norm) != said:
                return None
        layers = [self._modules[name] for name in names]
        return layers if all(map(is_product, layers)) else None

    def plain_projections(self) -> list[QuantLinear] | None:
        """Return the q, k and v layers if none has an adapter."""
        layers = self.projections()
        return layers if layers is not None and all(type(layer) is QuantLinear for layer in layers) else None


class FusedAttention(AttentionPiece):
    """A fused attention module of transformers. `lowbit.fuse` makes it in place."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        named = {} if layer_past is None else {"layer_past": layer_past}  # as GPT-NeoX calls the cache
        cache = past_key_values if layer_past is None else layer_past
        facts, attend = self.facts, ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        heads = None if attend is None else trained_heads(self, hidden_states, position_embeddings)
        if heads is not None:
            query, key, value = heads
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx)
            out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, **facts["options"] | kwargs)
            return self._modules[facts["out"]](out.reshape(*hidden_states.shape[:2], -1)), weights
        layers = self.plain_projections() if is_inference(hidden_states) and not self.training else None
        if layers is None or attend is None or not is_rotary(position_embeddings, facts["embedded"]):
            if position_embeddings is not None or facts["embedded"]:
                named["position_embeddings"] = position_embeddings
            return super().forward(
                hidden_states,
                attention_mask=attention_mask,
                **({"past_key_values": past_key_values} | named if facts["takes_cache"] else named),
                **kwargs,
            )
        qkv = facts["merged"](layers, hidden_states)
        return self.attended(attend, qkv, position_embeddings, attention_mask, cache, kwargs)

    def attended(
        self,
        attend: Callable[..., tuple[Tensor, Tensor | None]],
        qkv: Tensor,
        position_embeddings: Any,
        mask: Tensor | None,
        cache: Any,
        more: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result of the module for its projections ``[B, L, n]``, and the weights that ``attend``
        returns."""
        facts, (batch, length, _) = self.facts, qkv.shape
        qkv = qkv.view(batch, length, -1, facts["head_dim"])
        if facts["of_keys"] != 1.0:
            self.keys_in(qkv).mul_(facts["of_keys"])
        if facts["half_rotary"]:
            position_embeddings = whole_columns(position_embeddings)
        query, key, value = self._append(qkv, position_embeddings, cache)
        options = facts["options"] | more
        if facts["sinks"] is not None:
            options[_SINK] = self._parameters[facts["sinks"]]
        out, weights = attend(self, query, key, value, mask, dropout=0.0, **options)
        out = out.reshape(batch, length, -1)
        if facts["layout"]["gated"]:
            out = out * qkv[:, :, 1 : 2 * query.shape[1] : 2].flatten(2).sigmoid()
        return self._modules[facts["out"]](out), weights

    def keys_in(self, qkv: Tensor) -> Tensor:
        """Return the heads of the keys in ``qkv [.., heads, head_dim]``, which are not grouped or gated."""
        count = self.facts["kv_heads"]
        return qkv[..., qkv.shape[-2] - 2 * count : qkv.shape[-2] - count, :]

    def _append(self, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any) -> tuple[Tensor, ...]:
        """Return the queries of the new tokens, and the keys and values of all tokens."""
        place = self.place_in(cache, qkv)
        layer, keys, values, start = place or self.place_in(None, qkv)
        facts = self.facts
        rotary = position_embeddings if facts["rotates"] else 2 * (qkv.new_empty(1, qkv.shape[1], 0),)
        query = rope_append(qkv, *rotary, keys, values, start, *self.norm_args(), **facts["layout"])
        if place is None:
            keys, values = cache.update(keys, values, self.layer_idx)
        elif layer is not None:
            keys, values = layer.last(layer.extend(qkv.shape[1]))
        return query, keys, values

    def place_in(
        self, cache: Any, x: Tensor
    ) -> tuple[GrowingLayer | GrowingSlidingLayer | None, Tensor, Tensor, int] | None:
        """Return the memory for the keys and values of the new tokens ``x [B, L, ...]``.

        The result has the layer of the cache, whose `extend` counts the tokens, its keys, its values, and the index of
        the first new token in them. Without a cache, the memory is new. The result is None if tokens can be added to
        this cache only through its ``update``.
        """
        batch, length, heads = *x.shape[:2], self.facts["kv_heads"]
        size = self.facts["head_dim"]
        if cache is None:
            return None, *x.new_empty(2, batch, heads, length, size), 0
        layer = growing_layer(cache, self.layer_idx)
        room = None if layer is None else layer.room_for(length, new_tokens(batch, heads, size, x), x)
        return None if room is None else (layer, *room)

    def norm_args(self) -> tuple[Any, ...]:
        """Return the head norms as arguments of `rope_append`."""
        norm = self.facts["norm"]
        weights = [module._parameters["weight"] for module in self.facts["norms"]]
        return (*weights, norm["eps"], norm["offset"]) if norm else ()


def pair_of(embeddings: Any) -> Any:
    """Return cos and sin ``[B, L, R / 2]`` of rotary embeddings that are complex numbers (DeepSeek V2), others as they
    are."""
    is_complex = isinstance(embeddings, Tensor) and embeddings.is_complex()
    return (embeddings.real, embeddings.imag) if is_complex else embeddings


def is_rotary(embeddings: tuple[Tensor, Tensor] | None, wanted: bool) -> bool:
    """Whether cos and sin have the form that the module got when it was fused; some modules get none."""
    return embeddings[0].dim() == 3 if wanted and embeddings is not None else (embeddings is None) is not wanted


def whole_columns(embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cos and sin ``[B, L, R]`` of a rotary embedding that has them once for both halves of a head (gpt-oss)."""
    cos, sin = embeddings
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def may_be_attention(module: nn.Module) -> bool:
    """Whether the module may be attention, judged by the names of its submodules."""
    return bool(_names(module, [*((name,) for name in _PACKED), APART])) and bool(_names(module, zip(_OUT)))


def fuse_attention(
    module: nn.Module,
    rotary_columns: Sequence[int],
    piece: type[FusedAttention] = FusedAttention,
    adapters: tuple[str, ...] = (),
    given: dict[str, Any] | None = None,
) -> str:
    """Fuse ``module``, an attention module of transformers, or return the reason why it stays unchanged.

    The module is called with random tokens before and after. The queries, keys, values and options that it passes to
    the attention function, and its result, must agree with those of the fused module, for one of the layouts of
    `rope_append`.

    Args:
        module: the attention module.
        rotary_columns: the numbers of columns of a head that the model's rotary embeddings may rotate; none of a model
            without one.
        piece: the class that it gets.
        adapters: the names of submodules that add to the projections, which ``piece`` knows.
        given: more arguments of the trial calls.
    """
    facts = _names_of(module) | {"adapters": adapters}
    problem = _problem(module, facts)
    if problem:
        return problem
    norms = [module._modules[name] for name in facts["norm_names"]]
    of_norms = [norm_facts(norm) for norm in norms]
    if None in of_norms or of_norms[:1] != of_norms[1:]:
        return f"its {facts['norm_names'][0]} and {facts['norm_names'][1]} are no RMSNorm of heads"
    facts |= {
        "merged": MergedLinear(),
        "norm": of_norms[0] if norms else None,
        "norms": norms,
        "said": [said_eps(norm) for norm in norms],
        "noted": Attributes(module, without=READ_NOW),
        "trains_alike": False,
    }
    # A module that may get no cos and sin says so in its signature (Granite 4 hybrid); others may get what is not tried,
    # unless the model has no rotary embeddings (Nemotron-H, Jamba).
    may_lack = not rotary_columns or "position_embeddings" in inspect.signature(type(module).forward).parameters
    without = (0,) if may_lack else ()
    for columns, half_rotary in itertools.product(rotary_columns or without, (False, True)):
        call = _call(facts["hidden"], columns // 2 if half_rotary else columns) | (given or {})
        seen = recorded(recording_probe(module), call)
        if seen is None:
            continue
        sinks = next(
            (name for name, value in module._parameters.items() if value is seen["options"].get(_SINK, ...)), None
        )
        if {name for name, value in module._parameters.items() if value is not None} - {sinks}:
            return "it has parameters of its own"
        options = {name: value for name, value in seen["options"].items() if sinks is None or name != _SINK}
        if any(isinstance(value, Tensor) for value in options.values()):
            return "its attention has an option that is a tensor"
        facts |= {"kv_heads": seen["key"].shape[1], "head_dim": seen["key"].shape[-1], "options": options, "sinks": sinks}
        facts |= {"half_rotary": half_rotary, "embedded": columns > 0}
        facts["gated"] = _is_gated(module, facts, seen["query"])
        for layout in _layouts(facts, _numbers_of(module)):
            piece.take(probe := recording_probe(module), facts | layout)
            if agree(seen, recorded(probe, call)):
                facts |= layout
                facts["trains_alike"] = (
                    piece is FusedAttention
                    and may_train(module, facts)
                    and trains_alike(recording_probe(module), call, seen)
                )
                piece.take(module, facts)
                return ""
    return "it does not compute rotary attention as the fused one does"


def _names(module: nn.Module, choices: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the first of these tuples of names that are all submodules."""
    return next((names for names in choices if all(module._modules.get(name) is not None for name in names)), ())


def _names_of(module: nn.Module) -> dict[str, Any]:
    projections = _names(module, [*((name,) for name in _PACKED), APART])
    (out,) = _names(module, zip(_OUT))
    hidden = getattr(module._modules[projections[0]], "in_features", 0)
    takes_cache = "past_key_values" in inspect.signature(type(module).forward).parameters
    return {
        "projections": projections, "out": out, "norm_names": _names(module, _HEAD_NORMS), "hidden": hidden,
        "takes_cache": takes_cache,
    }  # fmt: skip


def _is_gated(module: nn.Module, facts: dict[str, Any], query: Tensor) -> bool:
    """Whether the layer of queries has as many outputs again, for gates."""
    outputs = module._modules[facts["projections"][0]].out_features
    return len(facts["projections"]) > 1 and outputs == 2 * query.shape[1] * query.shape[3]


def _numbers_of(module: nn.Module) -> list[float]:
    """Return the numbers by which a module may multiply its keys: its attributes."""
    return [value for value in module.__dict__.values() if type(value) is float and value not in (0.0, 1.0)]


def _layouts(facts: dict[str, Any], factors: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Return the ways in which heads may lie in qkv, be rotated and be normalized, the usual one first; then, without
    norms, with the keys times one of the factors (Falcon-H1)."""
    for layout in _layouts_of_heads(facts):
        yield layout | {"of_keys": 1.0}
    if not facts["norms"] and not facts["gated"]:
        for layout, factor in itertools.product(list(_layouts_of_heads(facts)), factors):
            if not layout["layout"]["grouped"]:
                yield layout | {"of_keys": factor}


def _layouts_of_heads(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    packed, norms = len(facts["projections"]) == 1, bool(facts["norms"])
    for rotation, grouped, behind in itertools.product(_ROTATIONS, (False, packed), (False, norms)):
        layout = {"rotation": rotation, "grouped": grouped, "norm_behind": behind, "gated": facts["gated"]}
        if facts["embedded"]:
            yield {"rotates": True, "layout": layout}
        if rotation == HALVES and not behind:
            yield {"rotates": False, "layout": layout}


def _problem(module: nn.Module, facts: dict[str, Any]) -> str:
    children, names, out = module._modules, facts["projections"], facts["out"]
    missing = [name for name in (*names, out) if not is_product(children.get(name))]
    if missing:
        return not_packed(missing[0], children.get(missing[0]))
    idle = {name for name, child in children.items() if child is None or type(child) in IDLE}
    known = {*names, out, *facts["norm_names"], *facts["adapters"], *idle}
    if not set(children) <= known:
        return f"it has {', '.join(sorted(set(children) - known))}"
    if any(value is not None for value in module._buffers.values()):
        return "it has buffers of its own"
    for name in ("config", "layer_idx"):
        if not hasattr(module, name):
            return f"it has no {name}"
    if not base_of(children[out]).weight.is_cpu:
        return "it is not on the CPU, where the kernel rows are"
    hook = hooked(module, (*names, *facts["norm_names"]))
    return f"hooks on {hook}" if hook else ""


def _call(hidden: int, columns: int) -> dict[str, Any]:
    generator = torch.Generator("cpu").manual_seed(0)
    angle = torch.rand(1, _PROBED, columns, dtype=torch.float32, device="cpu", generator=generator) * 6
    call = {
        "hidden_states": torch.randn(2, _PROBED, hidden, dtype=torch.float32, device="cpu", generator=generator),
        "attention_mask": None,
        "past_key_values": None,
    }
    return call | ({"position_embeddings": (angle.cos(), angle.sin())} if columns else {})
