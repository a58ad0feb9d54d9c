# SPDX-License-Identifier: Apache-2.0
"""The output head of a language model, and the table of tokens that shares its weight.

The errors of a head reach the probabilities unmixed. With 4 bits it costs SmolLM2-135M as much perplexity as all other
layers together: float32 54.1, these in int4 g32 with int8 activations 62.7, the head too 73.9; with 8 bits in the same
groups 62.7, with a scale per row 63.9 (pages of docs/, 3072 tokens). llama.cpp keeps heads in 6 or 8 bits as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowbit import _C
from lowbit.formats.base import FormatConfig
from lowbit.formats.int8 import int8_dynamic_activation_int8_weight, int8_weight_only
from lowbit.formats.text import config_of
from lowbit.quant.kinds import kind_of
from lowbit.quant.quant_embedding import EMBEDDING
from lowbit.quant.quant_linear import LINEAR

INT8 = "int8"


def head_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layer that ``model.get_output_embeddings()`` names, and every embedding that has its weight;
    nothing where the model names none."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    head = getattr(head, "base_layer", head)  # below an adapter of peft
    if not isinstance(head, nn.Module) or kind_of(head) is not LINEAR:
        return []
    tables = (module for module in model.modules() if kind_of(module) is EMBEDDING)
    return [head, *(table for table in tables if table.weight is head.weight)]


def head_config(function: str, head: Any, config: FormatConfig | None) -> FormatConfig | None:
    """Return the configuration of the output head, or None where it is a layer like any other.

    Args:
        function: the name of the function that has the argument ``head``, for errors.
        head: "int8" takes 8 bits, and the groups and activations of ``config``, where that has fewer bits or leaves
            weights out; None takes the head as any layer; anything else goes to `config_of`.
        config: the configuration of all other layers; None for float.
    """
    if head is None or (head == INT8 and config is None):
        return None
    if head != INT8:
        try:
            return config_of(head)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{function}: head must be 'int8', None or a configuration: {error}") from None
    spec = config.spec(torch.float32)
    facts = _C.FORMAT_FACTS[spec.format]
    if spec.is_float or (facts["bits"] >= 8 and facts["kind"] != "semi_sparse"):
        return None
    group_size = spec.group_size or None
    return int8_dynamic_activation_int8_weight(group_size) if "int8" in spec.x_format else int8_weight_only(group_size)
