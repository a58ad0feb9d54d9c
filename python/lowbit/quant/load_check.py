# SPDX-License-Identifier: Apache-2.0
"""Check a whole state dict before load_state_dict copies the first tensor, so that a refused one leaves the model
as it was."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowbit import _C
from lowbit.formats.spec import StoredWeight
from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.layout import numbers_of, repack_weight
from lowbit.quant.linear_layers import is_fake_quantized
from lowbit.quant.quant_embedding import QuantEmbedding
from lowbit.quant.quant_linear import QuantLinear


def check_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse entries that are not the packed weights of the QuantLinear and QuantEmbedding layers under ``module``, or
    are packed where a layer is being trained. Those that are one tensor are still one in the layout that is loaded.

    Raises:
        ValueError: names every such layer with the wanted entry and that of the state dict.
    """
    layers = {
        f"{prefix}{name}." if name else prefix: child
        for name, child in module.named_modules(remove_duplicate=False)
        if _is_checked(child)
    }
    problems = [text for at, layer in layers.items() if (text := layer.state_dict_problem(state_dict, at))]
    if problems:
        rest = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError("load_state_dict: " + "; ".join(problems[:3]) + rest)
    _repack_shared({at: layer for at, layer in layers.items() if isinstance(layer, _PACKED)}, state_dict)


_PACKED = (QuantLinear, QuantEmbedding)


def _is_checked(module: nn.Module) -> bool:
    return isinstance(module, (*_PACKED, BlockSparseLinear)) or is_fake_quantized(module)


def _repack_shared(layers: dict[str, QuantLinear | QuantEmbedding], state_dict: dict[str, Any]) -> None:
    """Repack a weight that several layers share once, or each would have its own where the state dict is assigned."""
    sharing: dict[tuple[Any, ...], list[tuple[str, StoredWeight]]] = {}
    for prefix, layer in layers.items():
        weight, numbers = state_dict.get(prefix + "weight"), state_dict.get(prefix + "layout")
        if isinstance(weight, Tensor) and not numbers.is_meta:
            stored = numbers_of(numbers)
            layout = layer.layout_name if isinstance(layer, QuantEmbedding) else _C.LAYOUT
            if stored.layout != layout:
                memory = weight.untyped_storage()._cdata, weight.storage_offset(), weight.stride()
                kind = stored.spec.weight_args(stored.n, stored.k), layout
                sharing.setdefault((memory, *kind), []).append((prefix, stored))
    for (*_, layout), those in sharing.items():
        if len(those) > 1:
            prefix, stored = those[0]
            weight = repack_weight(state_dict[prefix + "weight"], stored, layout)
            for prefix, stored in those:
                numbers = stored.spec.layout(stored.n, stored.k, layout)
                state_dict[prefix + "weight"] = weight
                state_dict[prefix + "layout"] = state_dict[prefix + "layout"].new_tensor(numbers)


def check_state_dicts_of(model: nn.Module) -> None:
    """Register the check on ``model`` and on every module in it that holds such a layer, once."""
    holders = {
        prefix
        for name, child in model.named_modules(remove_duplicate=False)
        if _is_checked(child)
        for prefix in _ancestors(name)
    }
    for name in holders:
        module = model.get_submodule(name)
        hooks = module._load_state_dict_pre_hooks.values()
        if not any(getattr(hook, "hook", hook) is check_state_dict for hook in hooks):
            module.register_load_state_dict_pre_hook(check_state_dict)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts))]
