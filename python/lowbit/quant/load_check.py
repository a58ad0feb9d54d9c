# SPDX-License-Identifier: Apache-2.0
"""Guards against code that mistakes packed layers for float layers.

A state dict is checked as a whole before load_state_dict copies the first tensor, so that a rejected state dict leaves
the model unchanged. In inference, nn.TransformerEncoderLayer passes linear1.weight and linear2.weight to a fused float
op, and nn.TransformerEncoder turns padded batches into nested tensors for it. Each checks an attribute of its own that
has no other purpose, and that attribute is cleared. peft's adapter layers around a packed layer become layers that can
merge into it.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from lowbit.formats.spec import StoredWeight
from lowbit.quant.adapters import adopt_adapters
from lowbit.quant.block_sparse import BlockSparseLinear
from lowbit.quant.kinds import is_fake_quantized, is_packed, kind_of, layout_name, packed_weights
from lowbit.quant.layout import numbers_of, repack_weight


def guard(model: nn.Module) -> list[str]:
    """Guard the packed and prepared layers that a model has now; return notes for the report."""
    _check_state_dicts_of(model)
    if "peft" in sys.modules:
        adopt_adapters(model)
    return _disable_encoder_fast_path(model)


def check_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Check that the entries of a state dict fit the packed layers under ``module`` and its layers in training.

    This is a load_state_dict pre-hook. Entries that share a tensor still share one after conversion to the layout of
    the layers.

    Raises:
        ValueError: entries do not fit; the message shows the expected and the actual entry of up to three layers.
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
    _repack_shared({at: layer for at, layer in layers.items() if is_packed(layer)}, state_dict)


def _is_checked(module: nn.Module) -> bool:
    return is_packed(module) or isinstance(module, BlockSparseLinear) or is_fake_quantized(module)


def _repack_shared(layers: dict[str, nn.Module], state_dict: dict[str, Any]) -> None:
    """Repack a weight that several layers share only once, so that they still share it with ``assign=True``."""
    sharing: dict[tuple[Any, ...], list[tuple[str, StoredWeight]]] = {}
    for prefix, layer in layers.items():
        layout = kind_of(layer).layout_of(layer)
        for name in (f"{prefix}{weight.key}" for weight in packed_weights(layer)):
            weight, numbers = state_dict.get(name), state_dict.get(layout_name(name))
            if isinstance(weight, Tensor) and not numbers.is_meta:
                stored = numbers_of(numbers)
                if stored.layout != layout:
                    memory = weight.untyped_storage()._cdata, weight.storage_offset(), weight.stride()
                    packed_as = stored.spec.weight_args(stored.n, stored.k), layout
                    sharing.setdefault((memory, *packed_as), []).append((name, stored))
    for (*_, layout), those in sharing.items():
        if len(those) > 1:
            name, stored = those[0]
            weight = repack_weight(state_dict[name], stored, layout)
            for name, stored in those:
                numbers = state_dict[layout_name(name)].new_tensor(stored.in_layout(layout).numbers)
                state_dict |= {name: weight, layout_name(name): numbers}


def _check_state_dicts_of(model: nn.Module) -> None:
    """Register `check_state_dict` once on ``model`` and on every submodule that contains a layer to check."""
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


def _disable_encoder_fast_path(model: nn.Module) -> list[str]:
    """Disable torch's fast path for every encoder layer that contains a layer of lowbit; return notes for the
    report."""
    count = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _has_ours(module):
            module.activation_relu_or_gelu = 0
            count += 1
        elif isinstance(module, nn.TransformerEncoder) and any(map(_has_ours, module.modules())):
            module.use_nested_tensor = False
    note = (
        f"torch's fused float inference path was turned off in {count} nn.TransformerEncoderLayer: "
        "it reads linear1.weight and linear2.weight directly"
    )
    return [note] if count else []


def _has_ours(module: nn.Module) -> bool:
    classes = (cls for child in module.children() for cls in type(child).__mro__)
    return any(cls.__module__.startswith("lowbit.") for cls in classes)
