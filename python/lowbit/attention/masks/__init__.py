# SPDX-License-Identifier: Apache-2.0
"""Ready-made masks for `flex_attention` and `create_block_mask`. ``&``, ``|`` and ``~`` combine masks, and
``masks.causal.plot()`` draws one."""

from lowbit.attention.masks.block_diffusion import block_diffusion
from lowbit.attention.masks.causal import causal
from lowbit.attention.masks.dilated import dilated
from lowbit.attention.masks.document import document, document_ids
from lowbit.attention.masks.global_window import global_window
from lowbit.attention.masks.natten import natten
from lowbit.attention.masks.prefix_lm import prefix_lm
from lowbit.attention.masks.sliding_window import sliding_window

__all__ = [
    "block_diffusion", "causal", "dilated", "document", "document_ids", "global_window", "natten", "prefix_lm",
    "sliding_window",
]  # fmt: skip
