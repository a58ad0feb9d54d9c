# SPDX-License-Identifier: Apache-2.0
"""The output head of a language model, and the token embedding that shares its weight.

All functions that quantize models have one rule for them: the head is packed like every other linear layer, but with 8
bits at least, and an embedding that is tied to it shares the packed weight.

Errors of the head affect the probabilities directly. In SmolLM2-135M, a head of 4 bits costs as much perplexity as all
other layers together. Perplexity on 3072 tokens of the pages in docs/: float32 54.1; all other layers in int4 g32 with
int8 activations 62.7; the head in the same format too 73.9; the head in int8 g32 62.7; the head in int8 with a scale
per row 63.9. llama.cpp, too, stores heads with 6 or 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowbit import _C
from lowbit.formats.algorithms import GPTQ
from lowbit.formats.base import FormatConfig
from lowbit.formats.int8 import int8_dynamic_activation_int8_weight, int8_weight_only
from lowbit.formats.text import config_of
from lowbit.quant.kinds import kind_of, stored_weight
from lowbit.quant.quant_embedding import EMBEDDING
from lowbit.quant.quant_linear import LINEAR

INT8 = "int8"


def head_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear layer that ``model.get_output_embeddings()`` returns, and every embedding that shares its
    weight; an empty list if the model has no such layer."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    head = getattr(head, "base_layer", head)  # the layer inside a peft adapter
    if not isinstance(head, nn.Module) or kind_of(head) is not LINEAR:
        return []
    tables = (module for module in model.modules() if kind_of(module) is EMBEDDING)
    return [head, *(table for table in tables if stored_weight(table) is stored_weight(head))]


def head_config(function: str, head: Any, config: FormatConfig | None) -> FormatConfig | None:
    """Return the configuration of the output head, or None if the head is treated like any other layer.

    Args:
        function: the name of the function with the argument ``head``, for error messages.
        head: "int8" gives the head ``config``, or 8 bits with the groups and activations of ``config`` if that has
            fewer bits, is sparse, or needs inputs (GPTQ), which a table does not have; None treats the head like any
            other layer; anything else is passed to `config_of`.
        config: the configuration of all other layers; None for float.

    Returns:
        The configuration of the head and of tables that are tied to it; None if there is no rule for them.

    Raises:
        TypeError, ValueError: ``head`` is not a configuration.
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
    is_dense = spec.is_float or (facts["bits"] >= 8 and facts["kind"] != "semi_sparse")
    if is_dense and not isinstance(spec.algorithm, GPTQ):
        return config
    group_size = spec.group_size or None
    return int8_dynamic_activation_int8_weight(group_size) if "int8" in spec.x_format else int8_weight_only(group_size)
