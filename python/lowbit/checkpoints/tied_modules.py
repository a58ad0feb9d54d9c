# SPDX-License-Identifier: Apache-2.0
"""The modules of a transformers model that share a weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from lowbit.quant.kinds import layer_with


def tied_modules(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the sorted names of all modules that share a weight, by the name of each module whose weight transformers
    ties."""
    shared: dict[str, set[str]] = defaultdict(set)
    ties: Mapping[str, str] = model.all_tied_weights_keys
    for target, source in ties.items():
        layers = {layer_with(target), layer_with(source)}
        if None not in layers:
            shared[source] |= layers
    return {name: tuple(sorted(names)) for names in shared.values() for name in names}
