# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention of transformers (DeepSeek V2 and V3, GLM 4.7 Flash, Kimi-Linear and others).

The cache has a latent vector for each token. transformers projects all of them to keys and values in every call. Here
the queries of a few tokens are projected instead (latent_states.py), with ``attn_implementation="lowbit"``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit import _C
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.models.latent_states import HeadWeights, LatentStates
from lowbit.models.lowbit_attention import lowbit_attention
from lowbit.quant.fused import Fused, hooked, is_inference, not_packed, probe_of
from lowbit.quant.packing import pack_weight
from lowbit.quant.quant_linear import QuantLinear
from lowbit.quant.unchanged import Unchanged

_PROJECTION = "kv_b_proj"
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
    FusedLatentAttention.take(module, {"weights": _HeadsOfProjection()})
    return ""


@torch.no_grad()
def _is_the_formula(module: nn.Module, layer: QuantLinear) -> bool:
    heads, columns, rotated, rank = (getattr(module, name) for name in (*_SIZES[:3], _SIZES[4]))
    decoded = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    decoded.weight = nn.Parameter(layer.dequantize(torch.float32), requires_grad=False)
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
