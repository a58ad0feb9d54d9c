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
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


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
        """Return the parameter made from its tensors. Experts are read one by one; otherwise all of the tensors are in
        memory at the same time."""
        if not self.by_expert:
            return self._made(read, zip(self._patterns, self.sources, strict=True))
        first, count = self.expert(0, read), len(self.sources) // len({*self._patterns})
        value = first.new_empty(count, *first.shape)
        for number, place in enumerate(value):
            place.copy_(self.expert(number, read) if number else first)
        return value

    @property
    def by_expert(self) -> bool:
        """Whether each expert of the parameter is made from tensors of its own."""
        return merges_experts(self._converter)

    def expert(self, number: int, read: Callable[[str], Tensor]) -> Tensor:
        """Return an expert of a parameter that is made by expert, from its own tensors."""
        of_pattern: dict[str, list[str]] = defaultdict(list)
        for pattern, key in zip(self._patterns, self.sources, strict=True):
            of_pattern[pattern].append(key)
        (value,) = self._made(read, ((pattern, keys[number]) for pattern, keys in of_pattern.items()))
        return value

    def _made(self, read: Callable[[str], Tensor], sources: Iterable[tuple[str, str]]) -> Tensor:
        converter = copy.deepcopy(self._converter)
        for pattern, key in sources:
            converter.add_tensor(self.name, key, pattern, read(key))
        (value,) = converter.convert(self.name, model=self._model, config=self._model.config).values()
        return value[0] if isinstance(value, list) else value

    def missing(self, experts: int) -> list[int]:
        """Return the experts with missing tensors in the checkpoint."""
        return missing_experts(self.sources, len({*self._patterns}), experts)


def merges_experts(converter: WeightConverter) -> bool:
    """Return whether a conversion makes one parameter of separate experts, and converts each of them by itself."""
    merge, *others = converter.operations
    merges = isinstance(merge, MergeModulelist) and merge.dim == 0 and all(map(_is_by_expert, others))
    return merges and len(converter.target_patterns) == 1


def _is_by_expert(operation: Any) -> bool:
    """Return whether an operation on merged experts converts each of them by itself."""
    if isinstance(operation, Concatenate):
        return operation.dim != 0
    return isinstance(operation, Transpose) and 0 not in (operation.dim0, operation.dim1) and not operation.check_dims


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
