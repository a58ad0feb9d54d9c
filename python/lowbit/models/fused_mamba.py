# SPDX-License-Identifier: Apache-2.0
"""Mamba-1 mixers of transformers (Mamba, Falcon-Mamba, Jamba) through `lowbit.selective_scan`:

x, z = in_proj(x);  x = silu(conv1d(x));  step, B, C = x_proj(x);  y = out_proj(scan(x, dt_proj(step), A, B, C, D, z))

Falcon-Mamba and Jamba have a norm behind each of step, B and C. As a gated delta net, a mixer is taken as a whole, since
transformers looks its functions up in a modeling file that all models share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowbit.models.recurrent_layers import (
    agree,
    are_alike,
    boundaries_of,
    convolved,
    is_served,
    masked,
    probe_with_readers,
    refusal_of,
    refuse_packed_with_cache,
    results_of,
    scanned,
)
from lowbit.ops.selective_scan import selective_scan
from lowbit.quant.fused import Fused, hooked, probe_of
from lowbit.quant.fused_norm import agree as are_rows_of
from lowbit.quant.fused_norm import eps_of, result_of
from lowbit.quant.unchanged import Attributes

CONV, READER, STEPS, STEP, OUT = "conv1d", "in_proj", "x_proj", "dt_proj", "out_proj"
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
_CHILDREN = {CONV, READER, STEPS, STEP, OUT, "act"}  # "act" is the activation of the convolution
_READ_NOW = {"config", "facts", "layer_idx", "training"}  # attributes that are read in each call
NOTE = (
    "a prompt of Mamba-1 that goes on from a cache goes on from its state, where transformers begins with zeros: it "
    "says the same as one prompt"
)
_LENGTHS = (8, 1)  # of the calls of a trial


class FusedMamba(Fused):
    """A Mamba-1 mixer that runs on lowbit's op. `lowbit.fuse` makes it in place."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        facts, modules, parameters, index = self.facts, self._modules, self._parameters, self.layer_idx
        boundaries, of_step = boundaries_of(kwargs), modules[STEP]
        served = is_served(hidden_states, cache_params, index, kwargs) and type(of_step) is nn.Linear
        if not served or hooked(self, modules) or not facts["noted"].hold(self):
            others = {"cache_params": cache_params, "attention_mask": attention_mask} | kwargs
            return super().forward(hidden_states, **others)
        refuse_packed_with_cache("Mamba", boundaries, cache_params)
        x, z = modules[READER](masked(hidden_states, attention_mask)).chunk(2, dim=-1)
        x = masked(convolved(modules[CONV], x, cache_params, index, boundaries), attention_mask)
        step, b, c = modules[STEPS](x).split([of_step.in_features, *2 * [self.ssm_state_size]], dim=-1)
        if facts["norms"]:
            step, b, c = (modules[name](part) for name, part in zip(NORMS, (step, b, c), strict=True))
        dt = functional.linear(step, of_step.weight)
        a = -parameters["A_log"].float().exp()
        given = {"dt_bias": of_step.bias, "softplus": True, "cu_seqlens": boundaries}
        y = scanned(selective_scan, (x, dt, a, b, c, parameters["D"], z), given, cache_params, index)
        return modules[OUT](y.to(hidden_states.dtype))


def may_be_mamba(module: nn.Module) -> bool:
    """Return whether the names of children and parameters are those of a mixer."""
    return module._modules.keys() - set(NORMS) == _CHILDREN and "A_log" in module._parameters


def _is_weightless(norm: nn.Module) -> bool:
    """Whether a norm is an RMSNorm that multiplies by no weight (Falcon-Mamba)."""
    eps = eps_of(norm)
    if eps is None or any(True for _ in norm.parameters()):
        return False
    x = torch.tensor([[1e-3], [1.0], [30.0]], device="cpu") * torch.linspace(-1, 2, 32, device="cpu")
    y = result_of(norm, x)
    wide = x.double()
    return y is not None and are_rows_of(y, wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt())


def fuse_mamba(module: Any, tried: list[Any]) -> str:
    """Fuse ``module``, a Mamba-1 mixer of transformers, or return the reason why it stays unchanged.

    A copy with random float32 weights is called before and after, as `fuse_delta_net` does, but without a prompt that
    goes on from a cache.

    Args:
        module: the mixer.
        tried: the mixers of this model that were tried and fused so far.
    """
    children = module._modules
    if not hasattr(module, "layer_idx") or not isinstance(getattr(module, "ssm_state_size", None), int):
        return "it does not have the attributes of a Mamba-1 mixer"
    if type(children[STEP]) is not nn.Linear:  # whose weight transformers reads
        return f"its {STEP} is {type(children[STEP]).__name__}, no torch.nn.Linear"
    for name in (READER, STEPS, OUT):
        if not hasattr(children[name], "out_features"):
            return f"its {name} is {type(children[name]).__name__}, no linear layer"
    if refusal := refusal_of(module, CONV, getattr(module, "activation", None) or "none", children):
        return refusal
    norms = [name for name in NORMS if name in children]
    if norms and len(norms) != len(NORMS):
        return f"of the norms of step, B and C it has {', '.join(norms)} alone"
    hidden = children[READER].in_features
    facts = {"norms": bool(norms), "hidden": hidden, "noted": Attributes(module, without=_READ_NOW)}
    facts["weightless"] = [name for name in norms if _is_weightless(children[name])]
    if not any(are_alike(module, facts["noted"], other, CONV) for other in tried):
        generator = torch.Generator("cpu").manual_seed(0)
        probe = probe_with_readers(module, [READER, STEPS], [CONV, STEP, *norms], OUT, generator)
        wanted = results_of(probe, hidden, lengths=_LENGTHS)
        FusedMamba.take(taken := probe_of(probe), facts | {"noted": Attributes(probe, _READ_NOW)})
        if not agree(wanted, results_of(taken, hidden, lengths=_LENGTHS)):
            return "its results are not those of selective_scan"
        tried.append(module)
    FusedMamba.take(module, facts)
    return ""
