# SPDX-License-Identifier: Apache-2.0
"""Check a whole state dict before load_state_dict copies the first tensor, so that a refused one leaves the model
as it was."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.quant.quant_embedding import QuantEmbedding
from lowbit.quant.quant_linear import QuantLinear


def check_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse entries that are not the packed weights of the QuantLinear and QuantEmbedding layers under ``module``.

    Raises:
        ValueError: names every such layer with what it wants and what the state dict holds.
    """
    problems = []
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, (QuantLinear, QuantEmbedding)):
            problem = child.state_dict_problem(state_dict, f"{prefix}{name}." if name else prefix)
            problems += [problem] if problem else []
    if problems:
        rest = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError("load_state_dict: " + "; ".join(problems[:3]) + rest)


def check_state_dicts_of(model: nn.Module) -> None:
    """Register the check on ``model`` and on every module in it that holds such a layer, once."""
    holders = {
        prefix
        for name, child in model.named_modules(remove_duplicate=False)
        if isinstance(child, (QuantLinear, QuantEmbedding))
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
