# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers that autoquant measures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping

from torch import nn

from lowbit.autotune.seen_experts import SeenExperts
from lowbit.autotune.seen_layer import SeenLayer
from lowbit.autotune.seen_linear import SeenLinear
from lowbit.quant.kinds import Kind, kind_of, weights_of
from lowbit.quant.quant_experts import EXPERTS
from lowbit.quant.quant_linear import LINEAR

_CLASSES: dict[Kind, type[SeenLayer]] = {LINEAR: SeenLinear, EXPERTS: SeenExperts}
MEASURED = tuple(_CLASSES)


def seen_layers(modules: Mapping[str, nn.Module], heads: Container[int] = ()) -> list[SeenLayer]:
    """Return the layers to record, in the order of ``modules``; modules that share all weights are one layer.

    Args:
        modules: the modules by qualified name.
        heads: the ids of the modules that are output heads of language models.
    """
    groups: dict[tuple[object, ...], dict[str, nn.Module]] = defaultdict(dict)
    for name, module in modules.items():
        shared = ((id(module._parameters[weight.key]), weight.transposed) for weight in weights_of(module))
        groups[(kind_of(module), *shared)][name] = module
    return [
        _CLASSES[kind](group, is_head=any(id(module) in heads for module in group.values()))
        for (kind, *_), group in groups.items()
    ]
