# SPDX-License-Identifier: Apache-2.0
"""Fused attention for transformers' decoders: one product for q, k and v; one call for the norms of heads, the rotary
embedding and the write to the cache; then the attention function that the model uses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.models.decoder_pieces import APART, HEAD_NORMS, PACKED
from lowbit.models.growing_cache import GrowingLayer, GrowingSlidingLayer, growing_layer, new_tokens
from lowbit.ops.rope_append import rope_append
from lowbit.quant.fused import Fused, has_own_tensors, hooked, is_inference, probe_of
from lowbit.quant.fused_norm import norm_facts, said_eps
from lowbit.quant.merged import MergedLinear
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes

_TOLERANCE = 1e-4  # relative to the largest value: the same float32 products, rotated in another order
_PROBED = 3  # number of tokens in the probe
_RECORDING = "lowbit_recording"
"""The name of the attention function that records its arguments. Only the configuration of a probe names it."""
_READ_NOW = {"config", "facts", "is_causal", "layer_idx", "training"}  # attributes that are read in each call


class FusedAttention(Fused):
    """A fused attention module of transformers. `lowbit.fuse` makes it in place."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        facts, attend = self.facts, ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        layers = self.projections() if is_inference(hidden_states) and not self.training else None
        if layers is None or attend is None or position_embeddings is None or position_embeddings[0].dim() != 3:
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        batch, length, _ = hidden_states.shape
        qkv = facts["merged"](layers, hidden_states).view(batch, length, -1, self.head_dim)
        query, key, value = self._append(qkv, position_embeddings, past_key_values)
        out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, **(facts["options"] | kwargs))
        return self._modules["o_proj"](out.reshape(batch, length, -1)), weights

    def projections(self) -> list[QuantLinear] | None:
        """Return the layers of queries, keys and values, or None if one has an adapter or a hook, or if the scale, the
        soft cap or an eps has changed since the module was fused."""
        facts = self.facts
        names = facts["projections"]
        if hooked(self, (*names, *HEAD_NORMS)) or not facts["noted"].hold(self):
            return None
        of_norms = zip(HEAD_NORMS, facts["norms"], facts["said"], strict=False)  # empty if heads have no norms
        for name, norm, said in of_norms:
            if self._modules[name] is not norm or said_eps(norm) != said:
                return None
        layers = [self._modules[name] for name in names]
        return layers if all(type(layer) is QuantLinear for layer in layers) else None

    def _append(self, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any) -> tuple[Tensor, ...]:
        """Return the queries of the new tokens, and the keys and values of all tokens."""
        place = self.place_in(cache, qkv)
        layer, keys, values, start = place or self.place_in(None, qkv)
        query = rope_append(qkv, *position_embeddings, keys, values, start, *self.norm_args())
        if place is None:
            keys, values = cache.update(keys, values, self.layer_idx)
        elif layer is not None:
            keys, values = layer.last(layer.extend(qkv.shape[1]))
        return query, keys, values

    def place_in(
        self, cache: Any, x: Tensor
    ) -> tuple[GrowingLayer | GrowingSlidingLayer | None, Tensor, Tensor, int] | None:
        """Return the memory for the keys and values of the new tokens ``x [B, L, ...]``: the layer of the cache, which
        counts the tokens by `extend`; its keys and values; and the index of the first new token in them. Without a
        cache, the memory is new. Return None if this cache takes tokens only through its ``update``."""
        batch, length, heads = *x.shape[:2], self.facts["kv_heads"]
        if cache is None:
            return None, *x.new_empty(2, batch, heads, length, self.head_dim), 0
        layer = growing_layer(cache, self.layer_idx)
        room = None if layer is None else layer.room_for(length, new_tokens(batch, heads, self.head_dim, x), x)
        return None if room is None else (layer, *room)

    def norm_args(self) -> tuple[Any, ...]:
        """Return the norms of heads as arguments of `rope_append`."""
        norm = self.facts["norm"]
        weights = [module._parameters["weight"] for module in self.facts["norms"]]
        return (*weights, norm["eps"], norm["offset"]) if norm else ()


def fuse_attention(module: nn.Module, rotary_columns: Sequence[int]) -> str:
    """Fuse ``module``, an attention module of transformers, or return the reason why it stays unchanged.

    A call with random tokens compares the code before and after the attention function: the queries, keys, values,
    options and the result must agree with those of the fused module.

    Args:
        module: the attention module.
        rotary_columns: the numbers of columns of a head that the model's rotary embeddings may rotate.
    """
    problem = _problem(module)
    if problem:
        return problem
    names = PACKED if "qkv_proj" in module._modules else APART
    layers = [module._modules[name] for name in names]
    norms = [module._modules[name] for name in HEAD_NORMS if name in module._modules]
    of_norms = [norm_facts(norm) for norm in norms]
    if None in of_norms or of_norms[:1] != of_norms[1:]:
        return "its q_norm and k_norm are no RMSNorm of heads"
    for columns in rotary_columns:
        call = _call(layers[0].in_features, columns)
        probe = probe_of(module)
        probe.config = copy.deepcopy(module.config)
        probe.config._attn_implementation = _RECORDING
        seen = _recorded(probe, call)
        if seen is None:
            continue
        facts = {
            "projections": names,
            "merged": MergedLinear(),
            "kv_heads": seen["key"].shape[1],
            "norm": of_norms[0] if norms else None,
            "norms": norms,
            "said": [said_eps(norm) for norm in norms],
            "noted": Attributes(module, without=_READ_NOW),
            "options": {name: value for name, value in seen["options"].items() if name != "dropout"},
        }
        if any(isinstance(value, Tensor) for value in facts["options"].values()):
            return "its attention has an option that is a tensor"
        FusedAttention.take(probe, facts)
        if _agree(seen, _recorded(probe, call)):
            FusedAttention.take(module, facts)
            return ""
    return "it does not compute rotary attention as the fused one does"


def _problem(module: nn.Module) -> str:
    children = module._modules
    names = PACKED if "qkv_proj" in children else APART
    missing = [name for name in (*names, "o_proj") if type(children.get(name)) is not QuantLinear]
    if missing:
        return f"{missing[0]} is {type(children.get(missing[0])).__name__}, no QuantLinear"
    known = {*names, "o_proj", *HEAD_NORMS, *(name for name, child in children.items() if child is None)}
    if not set(children) <= known or ("q_norm" in children) != ("k_norm" in children):
        return f"it has {', '.join(sorted(set(children) - known)) or 'one norm of two'}"
    if has_own_tensors(module):
        return "it has parameters of its own"
    for name in ("config", "head_dim", "layer_idx"):
        if not hasattr(module, name):
            return f"it has no {name}"
    if not module.o_proj.weight.is_cpu:
        return "it is not on the CPU, where the kernel rows are"
    hook = hooked(module, (*names, *HEAD_NORMS))
    return f"hooks on {hook}" if hook else ""


def _call(hidden: int, columns: int) -> dict[str, Any]:
    generator = torch.Generator("cpu").manual_seed(0)
    angle = torch.rand(1, _PROBED, columns, dtype=torch.float32, device="cpu", generator=generator) * 6
    return {
        "hidden_states": torch.randn(2, _PROBED, hidden, dtype=torch.float32, device="cpu", generator=generator),
        "position_embeddings": (angle.cos(), angle.sin()),
        "attention_mask": None,
        "past_key_values": None,
    }


@torch.no_grad()
def _recorded(probe: nn.Module, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the attention function in this call and the result, or None if the call fails or does not
    reach the attention function."""
    probe.seen = seen = {}
    try:
        seen["out"] = probe(**call)[0]
    except (TypeError, RuntimeError, ValueError, AttributeError):  # it takes other arguments
        return None
    return seen if "query" in seen else None


def _record(
    probe: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Record the arguments and return the queries as the result."""
    probe.seen.update(query=query, key=key, value=value, options=options)
    return query.transpose(1, 2).contiguous(), None


def _agree(wanted: dict[str, Any], got: dict[str, Any] | None) -> bool:
    return got is not None and got["options"] == wanted["options"] and all(
        got[name].shape == wanted[name].shape
        and bool((got[name] - wanted[name]).abs().max() <= _TOLERANCE * wanted[name].abs().max())
        for name in ("query", "key", "value", "out")
    )


AttentionInterface.register(_RECORDING, _record)
