# SPDX-License-Identifier: Apache-2.0
"""The mask that a transformers model creates with ``attn_implementation="lowbit"``.

lowbit's attention takes the masks that torch's takes: a boolean mask, or no mask if attention is purely causal; and a
`DocumentMask`, if several documents are packed into a row. A model
that was not written for SDPA may rely on the mask of eager attention, which always exists and holds floats. For
example, DeepSeek-V4 pads the mask with 0 for keys that every query sees; in a boolean mask, 0 would hide them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import eager_mask, sdpa_mask

from lowbit.models.document_mask import document_mask

_AS_WITH_SDPA = {
    "flint": "sinks",
    "gemma2": "softcap",
    "gpt_oss": "sinks",
    "granite_swa": "sinks",
    "granitemoe_swa": "sinks",
    "mimo_v2_flash": "sinks",
    "t5gemma": "softcap",
    "t5_gemma_module": "softcap",
    "vaultgemma": "softcap",
}
"""Models (``model_type``) that declare no SDPA support only because torch's attention lacks a feature that lowbit's
has. They pass the mask on unchanged."""

_NEVER_NONE = ("gemma4_text", "gemma4_unified_text")
"""Models that drop queries whose result is not needed. Only a mask tells which keys the remaining queries may see."""

_floating: dict[type, bool] = {}


def lowbit_mask(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Return the mask for one kind of layer. The arguments are those of transformers' `sdpa_mask`."""
    if config is not None:
        if wants_eager_mask(config):
            return eager_mask(*args, config=config, **kwargs)
        if config.model_type in _NEVER_NONE:
            kwargs["allow_is_causal_skip"] = False
    asked = kwargs | {"config": config}
    documents = None if args else document_mask(sdpa_mask, asked)
    return sdpa_mask(*args, **asked) if documents is None else documents


@torch.compiler.assume_constant_result
def wants_eager_mask(config: Any) -> bool:
    """Whether the model of ``config`` may rely on the mask of eager attention."""
    if config.model_type in _AS_WITH_SDPA:
        return False
    kind = type(config)
    if kind not in _floating:
        models = [model for model in _subclasses(transformers.PreTrainedModel) if model.config_class is kind]
        if not models:  # its module is not imported yet
            return False
        _floating[kind] = not all(model._supports_sdpa for model in models)
    return _floating[kind]


def _subclasses(cls: type) -> set[type]:
    below = cls.__subclasses__()
    return {*below, *(further for each in below for further in _subclasses(each))}
