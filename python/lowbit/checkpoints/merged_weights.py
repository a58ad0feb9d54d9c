# SPDX-License-Identifier: Apache-2.0
"""Parameters that transformers merges while it loads a checkpoint: most checkpoints store the experts of a layer
separately (``experts.7.gate_proj.weight``), but the models have them as one tensor."""

from __future__ import annotations

import copy
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


@dataclass(frozen=True)
class MergedWeight:
    """A parameter that is made from several tensors of a checkpoint, or converted from one.

    Args:
        name: the name of the parameter.
        sources: the names of the tensors, in the order in which transformers reads them.
    """

    name: str
    sources: tuple[str, ...]
    _patterns: tuple[str, ...]
    _converter: Any
    _model: nn.Module

    def value(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the parameter made from its tensors. All of them are in memory at the same time."""
        converter = copy.deepcopy(self._converter)
        for pattern, key in zip(self._patterns, self.sources, strict=True):
            converter.add_tensor(self.name, key, pattern, read(key))
        (value,) = converter.convert(self.name, model=self._model, config=self._model.config).values()
        return value[0] if isinstance(value, list) else value

    def missing(self, experts: int) -> list[int]:
        """Return the experts with missing tensors in the checkpoint."""
        return missing_experts(self.sources, len({*self._patterns}), experts)


def missing_experts(keys: Iterable[str], count: int, experts: int) -> list[int]:
    """Return the experts of which there are fewer than ``count`` tensors among these names in a checkpoint."""
    found = Counter(int(number) for key in keys for number in re.findall(r"\.(\d+)\.", key)[-1:])
    return [expert for expert in range(experts) if found[expert] < count]


def merged_weights(model: nn.Module, keys: Iterable[str]) -> dict[str, MergedWeight]:
    """Return, by name, the parameters of a transformers model that are made from these tensors by a converter with one
    result."""
    conversions = get_model_conversion_mapping(model)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    known, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if pattern is not None and name in known and len(by_pattern[pattern].target_patterns) == 1:
            found[name].append((pattern, key))
    return {
        name: MergedWeight(
            name, tuple(key for _, key in parts), tuple(pattern for pattern, _ in parts), by_pattern[parts[0][0]], model
        )
        for name, parts in found.items()
    }
