# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of transformers (DeepSeek V2 and V3, GLM 4.7 Flash, Kimi-Linear and others).

The cache has a latent vector for each token. transformers projects all of them to keys and values in every call. Here
the queries of a few tokens are projected instead (latent_states.py), with ``attn_implementation="lowbit"``: by the
module, or by the steps of its layer's program (latent_steps.py), if a probe call finds what the module computes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit import _C
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.models.attention_probe import agree, recorded, recording_probe
from lowbit.models.fused_attention import IDLE, READ_NOW, pair_of, whole_columns
from lowbit.models.latent_states import HeadWeights, LatentStates
from lowbit.models.lowbit_attention import lowbit_attention
from lowbit.ops.rope_append import (
    HALVES,
    NEIGHBOURS,
    NEIGHBOURS_OF_HALVES,
    NEIGHBOURS_TO_HALVES,
    rope_append,
)
from lowbit.quant.fused import Fused, has_own_tensors, hooked, is_inference, not_packed, probe_of
from lowbit.quant.fused_norm import norm_facts
from lowbit.quant.lora_layers import is_product
from lowbit.quant.packing import pack_weight
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Attributes, Unchanged

_PROJECTION = "kv_b_proj"
_QUERIES = (("q_proj",), ("q_a_proj", "q_b_proj"))
_KEYS, _OUT = "kv_a_proj_with_mqa", "o_proj"
_NORM_OF_QUERIES, _NORM_OF_KEYS = "q_a_layernorm", "kv_a_layernorm"
_ROTATIONS = (NEIGHBOURS_TO_HALVES, HALVES, NEIGHBOURS_OF_HALVES, NEIGHBOURS)
_SIZES = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_TOLERANCE = 1e-4  # relative to the largest value: float32 products of the same numbers
_PROBED = 3  # number of tokens in the probe


class FusedLatentAttention(Fused):
    """Latent attention that projects queries instead of keys. `lowbit.fuse` makes it in place."""

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Any, Any]:
        """Return what the attention function takes as keys and values."""
        expand, facts = super().expand_kv, self.__dict__.get("facts")
        if (
            facts is None  # another thread has unfused the module
            or self.training
            or not is_inference(latents)
            or ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation) is not lowbit_attention
            or hooked(self, (_PROJECTION,))
        ):
            return expand(latents, rotated)
        weights = facts["weights"].of(self, latents.dtype)
        if weights is None:
            return expand(latents, rotated)
        states = LatentStates(latents, rotated, *weights, expand)
        return states, states


class _HeadsOfProjection:
    """The matrices of each head in ``kv_b_proj``, as floats: a transposed copy of those for keys, and one of those for
    values. They are made again if the layer or the dtype of its input has changed."""

    def __init__(self) -> None:
        self._unchanged, self._weights, self._dtype = Unchanged(), None, None

    def of(self, module: nn.Module, dtype: torch.dtype) -> tuple[HeadWeights, HeadWeights] | None:
        """Return K_h^T and V_h of all heads; None if the layer is not packed."""
        if self._dtype is not dtype or not self._unchanged.holds():
            layer = module._modules[_PROJECTION]
            if type(layer) is not QuantLinear:
                return None
            self._weights, self._dtype, self._unchanged = _head_weights(module, layer, dtype), dtype, Unchanged()
            self._unchanged.note(module._modules, _PROJECTION)
            self._unchanged.note_module(layer)
            self._unchanged.note_contents(layer.weight)
        return self._weights


@torch.inference_mode(False)
@torch.no_grad()
def _head_weights(module: nn.Module, layer: QuantLinear, dtype: torch.dtype) -> tuple[HeadWeights, HeadWeights]:
    """Return copies in the dtype of float weights; of codes in float32, or in float16 where activations have 16 bits."""
    heads, columns = module.num_heads, module.qk_nope_head_dim
    of_heads = layer.dequantize(torch.float32).view(heads, -1, layer.in_features)
    of_codes = torch.float32 if dtype is torch.float32 else torch.float16
    own = getattr(torch, layer.spec.format) if layer.spec.is_float else of_codes
    spec = LinearSpec(str(own if of_heads.to(own).isfinite().all() else torch.float32).removeprefix("torch."))
    return tuple(
        HeadWeights(
            torch.stack([pack_weight(matrix, spec)[0].data for matrix in matrices]),
            StoredWeight(spec, *matrices.shape[1:], _C.LAYOUT, heads),
        )
        for matrices in (of_heads[:, :columns].mT.contiguous(), of_heads[:, columns:])
    )


def may_be_latent_attention(module: nn.Module) -> bool:
    """Return whether the module has the names of latent attention in transformers."""
    return hasattr(type(module), "expand_kv") and _PROJECTION in module._modules


def fuse_latent_attention(module: nn.Module) -> str:
    """Fuse ``module``, the latent attention of a model of transformers, or return the reason why it stays unchanged.

    Its ``expand_kv``, with the decoded weight and random latent vectors, must be the formula of latent_states.py.
    """
    layer = module._modules[_PROJECTION]
    if type(layer) is not QuantLinear:
        return not_packed(_PROJECTION, layer)
    if layer.bias is not None:
        return f"{_PROJECTION} has a bias"
    if not layer.weight.is_cpu:
        return "it is not on the CPU, where the kernel rows are"
    if missing := [name for name in (*_SIZES, "config") if not hasattr(module, name)]:
        return f"it has no {missing[0]}"
    if hook := hooked(module, (_PROJECTION,)):
        return f"hooks on {hook}"
    if not _is_the_formula(module, layer):
        return "it does not project its latent vectors as the fused one does"
    steps = _steps_of(module, layer)
    FusedLatentAttention.take(module, {"weights": _HeadsOfProjection(), "no_steps": "", **steps})
    return ""


def _decoded(layer: QuantLinear) -> nn.Linear:
    """Return a float layer with the decoded weight: a probe should not differ by the rounding of activations."""
    decoded = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    decoded.weight = nn.Parameter(layer.dequantize(torch.float32), requires_grad=False)
    return decoded


def _steps_of(module: nn.Module, layer: QuantLinear) -> dict[str, Any]:
    """Return what the steps of a program need to know of the module, or why they cannot compute it (``no_steps``).

    The module is called with random tokens. The queries, keys and values that it passes to the attention function, and
    its result, must be those of its projections and norms, for one of the ways to rotate."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    readers = next((names for names in _QUERIES if children.keys() >= set(names)), ())
    layers, norms = (*readers, _KEYS, _OUT), (*([_NORM_OF_QUERIES] if len(readers) > 1 else []), _NORM_OF_KEYS)
    idle = {name for name, child in children.items() if type(child) in IDLE}
    if not readers or (missing := {*layers, *norms} - children.keys()):
        return {"no_steps": f"it has no {'q_proj' if not readers else min(missing)}"}
    if more := children.keys() - {*layers, *norms, _PROJECTION} - idle:
        return {"no_steps": f"it has {', '.join(sorted(more))}"}
    if other := next((name for name in layers if not is_product(children[name])), None):
        return {"no_steps": not_packed(other, children[other])}
    if other := next((name for name in norms if norm_facts(children[name]) is None), None):
        return {"no_steps": f"its {other} is no RMSNorm"}
    if module.kv_lora_rank == module.qk_rope_head_dim:  # the cache could not tell them from other keys and values
        return {"no_steps": "its latent vectors have the size of its rotated keys"}
    if has_own_tensors(module):
        return {"no_steps": "it has parameters or buffers of its own"}
    if absent := next((name for name in ("is_causal", "layer_idx") if not hasattr(module, name)), None):
        return {"no_steps": f"it has no {absent}"}
    facts = {
        "layers": layers, "norms": norms, "decoded": _PROJECTION, "sizes": tuple(getattr(module, n) for n in _SIZES),
        "noted": Attributes(module, without=READ_NOW), "hidden": module._modules[_KEYS].in_features,
    }  # fmt: skip
    probe = recording_probe(module)
    probe._modules[_PROJECTION] = _decoded(layer)
    found = _rotation_of(probe, facts)
    return {"no_steps": "it does not compute latent attention as steps do"} if found is None else facts | found


@torch.no_grad()
def _rotation_of(probe: nn.Module, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the module rotates its queries and keys, and its scale."""
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, _PROBED, facts["hidden"], dtype=torch.float32, device="cpu", generator=generator)
    angle = torch.rand(1, _PROBED, facts["sizes"][2], dtype=torch.float32, device="cpu", generator=generator) * 6
    half = angle[..., ::2]
    for embeddings in (None, (angle.cos(), angle.sin()), torch.polar(torch.ones_like(half), half)):
        call = {"hidden_states": x, "attention_mask": None, "past_key_values": None}
        seen = recorded(probe, call if embeddings is None else call | {"position_embeddings": embeddings})
        if seen is None or seen["options"].keys() != {"scaling"}:
            continue
        half_rotary = isinstance(embeddings, Tensor)
        pair = whole_columns(pair_of(embeddings)) if half_rotary else embeddings
        for rotation in _ROTATIONS if pair else (HALVES,):
            if agree(seen, {"options": seen["options"], **_computed(probe, facts, x, pair, rotation)}):
                found = {"rotates": pair is not None, "half_rotary": half_rotary, "rotation": rotation}
                return found | {"options": seen["options"], "scale": float(seen["options"]["scaling"])}
    return None


def _computed(
    probe: nn.Module, facts: dict[str, Any], x: Tensor, pair: tuple[Tensor, Tensor] | None, rotation: int
) -> dict[str, Tensor]:
    """Return the queries, keys, values and the result for x, as latent_steps.py computes them."""
    modules, (heads, kept, turned, _, rank) = probe._modules, facts["sizes"]
    *readers, of_keys, last = (modules[name] for name in facts["layers"])
    *of_queries, norm = (modules[name] for name in facts["norms"])
    q = readers[0](x)
    if of_queries:
        q = readers[1](of_queries[0](q))
    q, made = q.unflatten(-1, (heads, kept + turned)), of_keys(x)
    latents, rotated = norm(made[..., :rank])[:, None], _rotated(made[:, :, None, rank:], pair, rotation)
    query = torch.cat([q[..., :kept].transpose(1, 2), _rotated(q[..., kept:], pair, rotation)], dim=-1)
    key, value = probe.expand_kv(latents, rotated)
    attended = query if query.shape[-1] == value.shape[-1] else value
    return {"query": query, "key": key, "value": value, "out": last(attended.transpose(1, 2).flatten(2))}


def _rotated(x: Tensor, pair: tuple[Tensor, Tensor] | None, rotation: int) -> Tensor:
    """Return heads ``[B, L, H, R]`` rotated, as ``[B, H, L, R]``."""
    batch, length, _, columns = x.shape
    cos, sin = 2 * (x.new_empty(1, length, 0),) if pair is None else pair
    none = x.new_empty(batch, 0, length, columns)
    return rope_append(x, cos, sin, none, none, 0, rotation=rotation)


@torch.no_grad()
def _is_the_formula(module: nn.Module, layer: QuantLinear) -> bool:
    heads, columns, rotated, rank = (getattr(module, name) for name in (*_SIZES[:3], _SIZES[4]))
    decoded = _decoded(layer)
    if decoded.weight.shape != (heads * (columns + module.v_head_dim), rank):
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    latents, turned = (
        torch.randn(2, 1, _PROBED, size, dtype=torch.float32, device="cpu", generator=generator)
        for size in (rank, rotated)
    )
    keys, values = probe_of(module, **{_PROJECTION: decoded}).expand_kv(latents, turned)
    of_heads = latents @ decoded.weight.view(heads, -1, rank).mT
    wanted = of_heads[..., :columns], turned.expand(-1, heads, -1, -1), of_heads[..., columns:]
    got = keys[..., :columns], keys[..., columns:], values
    return all(
        one.shape == other.shape and bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())
        for one, other in zip(got, wanted, strict=True)
    )
