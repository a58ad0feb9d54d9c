# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets of transformers (Qwen3-Next, Qwen3.5, OLMo-hybrid, Kimi-Linear) through `lowbit.gated_delta_rule`.

transformers looks the delta rule and the convolution up as functions of a modeling file, which all models share. So the
module is taken as a whole: it gets a forward of lowbit's, and nothing outside of it changes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.delta_net_forms import CONV, Form, form_of, projected, sizes_of
from lowbit.models.ordered_projections import OrderedProjections
from lowbit.models.recurrent_layers import (
    Reader,
    agree,
    are_alike,
    boundaries_of,
    convolved,
    croppable,
    is_served,
    keep,
    masked,
    probe_with_readers,
    refusal_of,
    refuse_packed_with_cache,
    results_of,
    served_state,
)
from lowbit.ops.gated_delta_rule import gated_delta_rule
from lowbit.quant.fused import Fused, hooked, probe_of
from lowbit.quant.merged import MergedLinear
from lowbit.quant.unchanged import Attributes

_READ_NOW = {"config", "facts", "layer_idx", "training"}  # attributes that are read in each call


class FusedDeltaNet(Fused):
    """A gated delta net that runs on lowbit's op. `lowbit.fuse` makes it in place."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        x, facts, modules = hidden_states, self.facts, self._modules
        form, sizes = facts["form"], facts["sizes"]
        boundaries, index = boundaries_of(kwargs), self.layer_idx
        served = is_served(x, cache_params, index, kwargs)
        if not served or hooked(self, form.children) or not facts["noted"].hold(self):
            others = {"cache_params": cache_params, "attention_mask": attention_mask} | kwargs
            return super().forward(hidden_states, **others)
        refuse_packed_with_cache("gated delta net", boundaries, cache_params)
        x = masked(x, attention_mask)  # padded tokens have no key then
        qkv, z, g, b = projected(self, form, facts["merged"], x)
        beta = b.sigmoid() * facts["beta"]
        conv, norm, out = modules[CONV], modules[form.norm], modules[form.out]
        mixed = convolved(conv, qkv, cache_params, index, boundaries).split(sizes.columns, dim=-1)
        q, k = (part.unflatten(-1, (sizes.key_heads, sizes.dk)) for part in mixed[:2])
        v = mixed[2].unflatten(-1, (sizes.heads, sizes.dv))
        if (layer := croppable(cache_params, index)) is not None:
            o = layer.recur(_rule, (q, k, v, g, beta))
        else:
            state = served_state(None if cache_params is None else cache_params.get_recurrent_state(index))
            o, state = gated_delta_rule(q, k, v, g, beta, state, l2norm=True, cu_seqlens=boundaries)
            if cache_params is not None:
                keep(cache_params, index, state)
        y = norm(o.view(-1, sizes.dv), z.reshape(-1, sizes.dv))
        return out(y.view(*x.shape[:2], -1))


def _rule(tensors: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    return gated_delta_rule(*tensors, state, l2norm=True)


def fuse_delta_net(module: Any, tried: list[Any]) -> str:
    """Fuse ``module``, a gated delta net of transformers, or return the reason why it stays unchanged.

    A copy with random float32 weights is called before and after: a prompt with left padding, the tokens behind it, one
    token, and a call without a cache. Results and states must agree. Since the weights are not the module's, this is
    done once for modules that are alike, which matters because the reference may take seconds.

    Args:
        module: the gated delta net.
        tried: the modules of this model that were tried and fused so far.
    """
    form, sizes = form_of(module), sizes_of(module)
    activation = getattr(module, "activation", None)
    linear = [name for name in (*form.readers, form.behind_z) if name]
    if plain := [name for name in linear if not hasattr(module._modules[name], "out_features")]:
        return f"its {plain[0]} is {type(module._modules[plain[0]]).__name__}, no linear layer"
    if sizes is None or not hasattr(module, "layer_idx"):
        return "it does not have the attributes of a gated delta net"
    if refusal := refusal_of(module, CONV, activation or "none", form.children):
        return refusal
    facts = {
        "form": form,
        "sizes": sizes,
        "hidden": module._modules[form.readers[0]].in_features,
        "noted": Attributes(module, without=_READ_NOW),
        "merged": MergedLinear(),
        "ordered": OrderedProjections(),
    }
    if alike := next((other for other in tried if are_alike(module, facts["noted"], other, CONV)), None):
        FusedDeltaNet.take(module, facts | {"beta": alike.facts["beta"]})
        return ""
    hidden = facts["hidden"]
    probe = _probe(module, form)
    wanted = results_of(probe, hidden)
    for beta in (1.0, 2.0):
        FusedDeltaNet.take(taken := probe_of(probe), facts | {"beta": beta, "noted": Attributes(probe, _READ_NOW)})
        if agree(wanted, results_of(taken, hidden)):
            FusedDeltaNet.take(module, facts | {"beta": beta})
            tried.append(module)
            return ""
    return "its results are not those of gated_delta_rule"


def _probe(module: nn.Module, form: Form) -> nn.Module:
    generator = torch.Generator("cpu").manual_seed(0)
    probe = probe_with_readers(module, list(form.readers), [CONV, form.norm], form.out, generator)
    if form.behind_z:
        probe._modules[form.behind_z] = Reader(module._modules[form.behind_z], generator)
    if form.decay:
        probe._modules[form.decay] = copy.deepcopy(module._modules[form.decay]).float().eval()
    return probe
