# SPDX-License-Identifier: Apache-2.0
"""Registers ``attn_implementation="lowbit"`` with transformers on import. lowbit imports this module as soon as
transformers is imported (peers/when_imported.py)."""

from __future__ import annotations

import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from lowbit.models.attention_masks import lowbit_mask
from lowbit.models.hybrid_cache import grow_caches_in_place
from lowbit.models.lowbit_attention import lowbit_attention
from lowbit.models.quantized_cache import serve_quantized_caches

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"lowbit.huggingface needs transformers 5 or later, got {transformers.__version__}: its caches are others"
    )

NAME = "lowbit"

AttentionInterface.register(NAME, lowbit_attention)
AttentionMaskInterface.register(NAME, lowbit_mask)
grow_caches_in_place(NAME)
serve_quantized_caches(NAME)
