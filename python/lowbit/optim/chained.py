# SPDX-License-Identifier: Apache-2.0
"""Several optimizers as one, and the division of a model between Muon and another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_NAME = "ChainedOptimizer"


class ChainedOptimizer(torch.optim.Optimizer):
    """Optimizers of different parameters that step together, as one for schedulers and training loops.

    Its param groups are theirs, in their order, so a scheduler changes the lr of each group by its own lr.

    Args:
        optimizers: the optimizers, of any package. No parameter may belong to two of them.

    Raises:
        TypeError: one is not an optimizer.
        ValueError: there is none, or a parameter belongs to two.

    Example:
        >>> matrices, others = lowbit.optim.split_for_muon(model)
        >>> muon = lowbit.optim.Muon8bit(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")
        >>> optimizer = lowbit.optim.ChainedOptimizer([muon, lowbit.optim.AdamW8bit(others, lr=1e-3)])
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        chained = list(optimizers)
        for each in chained:
            if not isinstance(each, torch.optim.Optimizer):
                raise TypeError(f"{_NAME}: optimizers must be optimizers, got {type(each).__name__}")
        if not chained:
            raise ValueError(f"{_NAME}: optimizers must have one optimizer at least, got none")
        owners = [p for each in chained for group in each.param_groups for p in group["params"]]
        if len(set(owners)) < len(owners):
            raise ValueError(f"{_NAME}: optimizers must not share parameters, got {len(owners) - len(set(owners))} twice")
        super().__init__([group for each in chained for group in each.param_groups], {})
        self.optimizers = chained

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: a group belongs to one of the optimizers, and they are chained afterwards.

        Raises:
            RuntimeError: always, but from the constructor.
        """
        if hasattr(self, "optimizers"):
            raise RuntimeError(f"{_NAME}: add the group to one of the optimizers, and chain them then")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of each optimizer, and return the result of ``closure``, which is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of the optimizers, ``{"optimizers": [...]}``."""
        return {"optimizers": [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of a chain of as many optimizers.

        Raises:
            ValueError: it is not one, or an optimizer refuses its part.
        """
        parts = state_dict.get("optimizers")
        if not isinstance(parts, list) or len(parts) != len(self.optimizers):
            got = f"{len(parts)} of them" if isinstance(parts, list) else f"{', '.join(map(str, state_dict)) or 'nothing'}"
            raise ValueError(f"{_NAME}: the state dict must have {len(self.optimizers)} optimizers, got {got}")
        for each, part in zip(self.optimizers, parts, strict=True):
            each.load_state_dict(part)
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters of a model that `Muon` is made for, and all others.

    Muon is for matrices, and stacks of matrices, inside of a network. Embeddings, the output head of a model of
    transformers (``get_output_embeddings``), norms, biases and convolutions are among the others.

    Example:
        >>> matrices, others = lowbit.optim.split_for_muon(model)
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    ends = [head] if isinstance(head, nn.Module) else []
    ends += [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd))]
    outside = {p for module in ends for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim in (2, 3) and p not in outside]
    chosen = set(matrices)
    return matrices, [p for p in trained if p not in chosen]
