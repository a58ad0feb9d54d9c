# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 mixers of transformers (Mamba2, Bamba, Granite 4, Falcon-H1, Nemotron-H, Zamba2) through `lowbit.ssd`:

gate, xBC, dt = in_proj(x);  x, B, C = silu(conv1d(xBC));  y = out_proj(norm(ssd(x, dt, A, B, C, D), gate))

As a gated delta net, a mixer is taken as a whole, since transformers looks its functions up in a modeling file that all
models share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from lowbit.ops.ssd import ssd
from lowbit.quant.fused import Fused, hooked, probe_of
from lowbit.quant.unchanged import Attributes

CONV, READER, NORM, OUT = "conv1d", "in_proj", "norm", "out_proj"
_CHILDREN = {CONV, READER, NORM, OUT, "act"}  # "act" is the activation of the convolution
_READ_NOW = {"config", "facts", "layer_idx", "training"}  # attributes that are read in each call
NO_LIMIT = (0.0, math.inf)
_LIMIT_OF_TRIAL = (0.3, 1.0)  # so that most tokens of a trial are limited


@dataclass(frozen=True, slots=True)
class Sizes:
    """The heads of a mixer, their size, and the groups and the size of B and C."""

    heads: int
    p: int
    groups: int
    s: int

    @property
    def columns(self) -> list[int]:
        """The numbers of columns of x, B and C."""
        return [self.heads * self.p, self.groups * self.s, self.groups * self.s]


class FusedMamba2(Fused):
    """A Mamba-2 mixer that runs on lowbit's op. `lowbit.fuse` makes it in place."""

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        facts, modules, parameters, index = self.facts, self._modules, self._parameters, self.layer_idx
        boundaries = boundaries_of(kwargs)
        served = is_served(hidden_states, cache_params, index, kwargs)
        if not served or hooked(self, _CHILDREN) or not facts["noted"].hold(self):
            others = {"cache_params": cache_params, "attention_mask": attention_mask} | kwargs
            return super().forward(hidden_states, **others)
        refuse_packed_with_cache("Mamba-2", boundaries, cache_params)
        sizes, norm, out = facts["sizes"], modules[NORM], modules[OUT]
        limit = NO_LIMIT if _is_token(hidden_states, cache_params, index) else facts["limit"]
        x = masked(hidden_states, attention_mask)
        projected = modules[READER](x if facts["factor"] == 1 else x * facts["factor"])
        if (factors := self._buffers.get("mup_vector")) is not None:  # of Falcon-H1
            projected = projected * factors.to(projected.dtype)
        gate, columns, dt = projected.split([sizes.columns[0], sum(sizes.columns), sizes.heads], dim=-1)
        mixed = convolved(modules[CONV], columns, cache_params, index, boundaries)
        x, b, c = masked(mixed, attention_mask).split(sizes.columns, dim=-1)
        x, b, c = (
            x.unflatten(-1, (sizes.heads, sizes.p)),
            *(part.unflatten(-1, (sizes.groups, sizes.s)) for part in (b, c)),
        )
        given = {"dt_bias": parameters["dt_bias"], "softplus": True, "dt_limit": limit, "cu_seqlens": boundaries}
        a = -parameters["A_log"].float().exp()
        y = scanned(ssd, (x, dt, a, b, c, parameters["D"]), given, cache_params, index).flatten(2)
        y = y * functional.silu(gate) if type(norm) is nn.Identity else norm(y, gate)
        return out(y.to(hidden_states.dtype))


def _is_token(x: Tensor, cache: Any, index: int) -> bool:
    """Whether transformers computes this call as a single step, in which it does not limit the steps of time."""
    return x.shape[1] == 1 and cache is not None and cache.get_recurrent_state(index) is not None


def may_be_mamba2(module: nn.Module) -> bool:
    """Return whether the names of children and parameters are those of a mixer."""
    return module._modules.keys() == _CHILDREN and "A_log" in module._parameters


def fuse_mamba2(module: Any, tried: list[Any]) -> str:
    """Fuse ``module``, a Mamba-2 mixer of transformers, or return the reason why it stays unchanged.

    A copy with random float32 weights is called before and after, as `fuse_delta_net` does.

    Args:
        module: the mixer.
        tried: the mixers of this model that were tried and fused so far.
    """
    sizes, limit = _sizes_of(module), getattr(module, "time_step_limit", None)
    factor = getattr(module, "ssm_in_multiplier", 1.0)
    if sizes is None or not hasattr(module, "layer_idx") or not _is_limit(limit):
        return "it does not have the attributes of a Mamba-2 mixer"
    for name in (READER, OUT):
        if not hasattr(module._modules[name], "out_features"):
            return f"its {name} is {type(module._modules[name]).__name__}, no linear layer"
    activation = getattr(module, "activation", None) or "none"
    if refusal := refusal_of(module, CONV, activation, _CHILDREN):
        return refusal
    hidden = module._modules[READER].in_features
    facts = {"sizes": sizes, "limit": tuple(limit), "factor": factor, "hidden": hidden}
    facts["noted"] = Attributes(module, without=_READ_NOW)
    if not any(are_alike(module, facts["noted"], other, CONV) for other in tried):
        probe = _probe(module)
        wanted = results_of(probe, hidden)
        of_probe = {"limit": _LIMIT_OF_TRIAL, "noted": Attributes(probe, _READ_NOW)}
        FusedMamba2.take(taken := probe_of(probe), facts | of_probe)
        if not agree(wanted, results_of(taken, hidden)):
            return "its results are not those of ssd"
        tried.append(module)
    FusedMamba2.take(module, facts)
    return ""


def _sizes_of(module: nn.Module) -> Sizes | None:
    names = ("num_heads", "head_dim", "n_groups", "ssm_state_size")
    values = [getattr(module, name, None) for name in names]
    if not all(isinstance(value, int) and value > 0 for value in values):
        return None
    return Sizes(*values)


def _is_limit(limit: Any) -> bool:
    """Whether these are the least and the largest step of time that `ssd` takes."""
    return isinstance(limit, (tuple, list)) and len(limit) == 2 and 0 <= limit[0] < math.inf and limit[0] <= limit[1]


def _probe(module: nn.Module) -> nn.Module:
    generator = torch.Generator("cpu").manual_seed(0)
    norm = [] if type(module._modules[NORM]) is nn.Identity else [NORM]
    probe = probe_with_readers(module, [READER], [CONV, *norm], OUT, generator)
    probe.time_step_limit = _LIMIT_OF_TRIAL
    return probe
