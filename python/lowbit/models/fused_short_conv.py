# SPDX-License-Identifier: Apache-2.0
"""Short convolutions of transformers (LFM2, LFM2-MoE, LFM3) through `lowbit.causal_conv1d`:

B, C, x = in_proj(x);  y = out_proj(C * conv(B * x))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
)
from lowbit.quant.fused import Fused, hooked, probe_of
from lowbit.quant.unchanged import Attributes

CONV, READER, OUT = "conv", "in_proj", "out_proj"
_CHILDREN = {CONV, READER, OUT}
_READ_NOW = {"config", "facts", "layer_idx", "training"}  # attributes that are read in each call


class FusedShortConv(Fused):
    """A short convolution that runs on lowbit's op. `lowbit.fuse` makes it in place."""

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        x, cache, modules, index = hidden_states, past_key_values, self._modules, self.layer_idx
        boundaries = boundaries_of(kwargs)
        served = is_served(x, cache, index, kwargs)
        if not served or hooked(self, _CHILDREN) or not self.facts["noted"].hold(self):
            others = {"past_key_values": cache, "attention_mask": attention_mask} | kwargs
            return super().forward(hidden_states, **others)
        refuse_packed_with_cache("short convolution", boundaries, cache)
        b, c, x = modules[READER](masked(x, attention_mask)).chunk(3, dim=-1)
        conv, out = modules[CONV], modules[OUT]
        return out(c * convolved(conv, b * x, cache, index, boundaries, activation=None))


def may_be_short_conv(module: nn.Module) -> bool:
    """Return whether the names of children are those of a short convolution."""
    return module._modules.keys() == _CHILDREN and isinstance(module._modules[CONV], nn.Conv1d)


def fuse_short_conv(module: Any, tried: list[Any]) -> str:
    """Fuse ``module``, a short convolution of transformers, or return the reason why it stays unchanged.

    A copy with random float32 weights is called before and after, as `fuse_delta_net` does.

    Args:
        module: the short convolution.
        tried: those of this model that were tried and fused so far.
    """
    reader = module._modules[READER]
    if not hasattr(module, "layer_idx") or getattr(reader, "out_features", 0) != 3 * module._modules[CONV].in_channels:
        return "it does not have the attributes of a short convolution"
    if refusal := refusal_of(module, CONV, None, _CHILDREN):
        return refusal
    facts = {"hidden": reader.in_features, "noted": Attributes(module, without=_READ_NOW)}
    if not any(are_alike(module, facts["noted"], other, CONV) for other in tried):
        probe = probe_with_readers(module, [READER], [CONV], OUT, torch.Generator("cpu").manual_seed(0))
        wanted = results_of(probe, reader.in_features, "past_key_values")
        FusedShortConv.take(taken := probe_of(probe), {"noted": Attributes(probe, _READ_NOW)})
        if not agree(wanted, results_of(taken, reader.in_features, "past_key_values")):
            return "its results are not those of causal_conv1d"
        tried.append(module)
    FusedShortConv.take(module, facts)
    return ""
