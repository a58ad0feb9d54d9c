# SPDX-License-Identifier: Apache-2.0
"""Attention and MLP of a block that several layers of a model share (Zamba 2), with adapters for each use:

    q = q_proj(x) + B (A x), and so k and v;      down_proj(act(gate) * up), gate and up = halves of gate_up_proj(x) + B (A x)

transformers makes a block for each of these layers and ties their weights. The index of the layer is an argument of each
call; ``layer_dic`` has the number of its adapters. The projections of attention are not joined, because the views of one
block would leave the weights that it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowbit.models.adapter_factors import Added
from lowbit.models.fused_attention import FusedAttention, fuse_attention, is_rotary, may_be_attention
from lowbit.models.steps import Steps
from lowbit.ops.linear import activation_functions
from lowbit.quant.fused import has_hooks, is_inference, probe_of, with_children
from lowbit.quant.fused_mlp import FusedMLP, alike, fuse_mlp
from lowbit.quant.lora_layers import base_of, is_product
from lowbit.quant.quant_linear import QuantLinear

_USES, INDEX = "layer_dic", "layer_idx"
_PROBED = 3  # number of tokens in a trial


class FusedSharedAttention(FusedAttention):
    """The attention of a shared block. `lowbit.fuse` makes it in place."""

    def forward(
        self,
        hidden_states: Tensor,
        layer_idx: int,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        facts, attend = self.facts, ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        layers = self.plain_projections() if is_inference(hidden_states) and not self.training else None
        if layers is None or attend is None or not is_rotary(position_embeddings, facts["embedded"]):
            given = attention_mask, past_key_values, position_embeddings
            return super(FusedAttention, self).forward(hidden_states, layer_idx, *given, **kwargs)
        parts = [layer(hidden_states) for layer in layers]
        for part, name in zip(parts, facts["adapters"], strict=False):
            part += _adapter(self, name, layer_idx)(hidden_states)
        twin = with_children(self)
        twin.__dict__[INDEX] = layer_idx  # of the layer of the cache
        return twin.attended(attend, torch.cat(parts, -1), position_embeddings, attention_mask, past_key_values, kwargs)


class FusedSharedMLP(FusedMLP):
    """The MLP of a shared block. It runs its own code when it is called."""


def may_be_shared_attention(module: nn.Module) -> bool:
    """Whether the module may be the attention of a shared block, judged by the names of its submodules."""
    return hasattr(module, _USES) and may_be_attention(module)


def may_be_shared_mlp(module: nn.Module) -> bool:
    """Whether the module may be the MLP of a shared block: it has two packed layers, and adapters of one."""
    packed = [child for child in module._modules.values() if is_product(child)]
    return hasattr(module, _USES) and len(packed) == 2 and len(_lists_in(module)) == 1


def fuse_shared_attention(module: nn.Module, rotary_columns: Sequence[int]) -> str:
    """Fuse ``module``, the attention of a shared block, or return the reason why it stays unchanged, as `fuse_attention`
    does, which tries one use of it."""
    lists, uses = _lists_in(module), _uses_of(module)
    if len(lists) not in (0, 3) or not uses:
        return _NO_ADAPTERS
    return fuse_attention(module, rotary_columns, FusedSharedAttention, lists, {INDEX: uses[0]})


def fuse_shared_mlp(module: nn.Module) -> str:
    """Fuse ``module``, the MLP of a shared block, or return the reason why it stays unchanged.

    It is tried without adapters, as `fuse_mlp` does it, and then with those of each use.
    """
    uses, (name,) = _uses_of(module), _lists_in(module)
    if not uses:
        return _NO_ADAPTERS
    count = len(module._modules[name])
    plain = probe_of(module, **{name: nn.ModuleList(_Nothing() for _ in range(count)).eval()})
    return fuse_mlp(module, FusedSharedMLP, plain, {INDEX: uses[0]}, lambda facts: _adds(module, facts, name, uses))


_NO_ADAPTERS = "its adapters are no pairs of linear layers"


class _Nothing(nn.Module):
    """An adapter that adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(())


@torch.no_grad()
def _adds(module: nn.Module, facts: dict[str, Any], name: str, uses: Sequence[int]) -> bool:
    """Whether the MLP adds its adapter to the result of its first layer, in each use."""
    first, gate = module._modules[facts["first"]], facts["gate"]
    if gate is None:
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(_PROBED, first.in_features, generator=generator, device="cpu")
    probe = probe_of(module, **{facts["last"]: nn.Identity()})
    for index in uses:
        halves = (first(x) + _adapter(module, name, index)(x)).chunk(2, dim=-1)
        hidden = activation_functions[facts["activation"]](halves[gate]) * halves[1 - gate]
        if not alike(hidden, probe(x, **{INDEX: index})):
            return False
    return True


def _lists_in(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the lists of adapters, in their order."""
    return tuple(name for name, child in module._modules.items() if type(child) is nn.ModuleList)


def _uses_of(module: nn.Module) -> list[int]:
    """Return the indices of the layers for which the module has all adapters: others are those of another block."""
    lists = [module._modules[name] for name in _lists_in(module)]
    uses = getattr(module, _USES)
    return [index for index, use in uses.items() if all(len(each) > use and _is_pair(each[use]) for each in lists)]


def _is_pair(adapter: nn.Module) -> bool:
    parts = [*adapter._modules.values()]
    return isinstance(adapter, nn.Sequential) and len(parts) == 2 and all(hasattr(part, "in_features") for part in parts)


def _adapter(module: nn.Module, name: str, index: int) -> nn.Module:
    return module._modules[name][getattr(module, _USES)[index]]


def _steps_of(steps: Steps, module: nn.Module, name: str, index: int) -> tuple[QuantLinear, QuantLinear] | None:
    """Record the adapter of a use and return its A and B, or None if they cannot be steps."""
    lists, uses = module._modules[name], getattr(module, _USES)
    if index not in uses or not _is_pair(adapter := _adapter(module, name, index)):
        return None
    pair = [*adapter._modules.values()]
    if any(type(part) is not QuantLinear or part.bias is not None for part in pair):
        return None
    if any(map(has_hooks, (adapter, *pair))):
        return None
    steps.note_equal(module.__dict__, _USES)
    steps.note(lists._modules, *lists._modules)
    steps.note(adapter._modules, *adapter._modules)
    steps.note_module(adapter)
    return pair[0], pair[1]


def projected_with_adapters(steps: Steps, attention: Any, projections: Sequence[Any], index: int, x: int) -> int | None:
    """Write the projections and the adapters of a use, side by side, or return None if they cannot be steps."""
    names = attention.facts["adapters"]
    pairs = [_steps_of(steps, attention, name, index) for name in names]
    if None in pairs or index not in getattr(attention, _USES):
        return None
    parts = []
    for number, layer in enumerate(projections):
        part = steps.product(layer, x)
        if names:
            down, up = pairs[number]
            part = steps.product(up, steps.product(down, x), add=part)
        parts.append((part, base_of(layer).out_features))
    return steps.side_by_side(parts)


def added_to_halves(steps: Steps, mlp: Any, index: int, x: int) -> list[Added] | None:
    """Write the first factor of the adapter of a use; return what the halves of the first layer's outputs get, or None
    if it cannot be steps. The second factor is a decoded copy, because it is added before the activation."""
    (name,) = _lists_in(mlp)
    pair = _steps_of(steps, mlp, name, index)
    if pair is None or type(mlp._modules[mlp.facts["first"]]) is not QuantLinear:
        return None
    down, up = pair
    steps.note_linear(up)
    steps.note_contents(up.weight)
    inner = steps.product(down, x)
    return [Added(inner, 0, half) for half in up.dequantize().chunk(2)]
