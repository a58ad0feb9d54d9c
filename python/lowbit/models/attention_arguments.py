# SPDX-License-Identifier: Apache-2.0
"""The arguments that a transformers model may pass to its attention function.

A model may pass any keyword argument, and dropping one silently could change the result. So each is listed here by
name.
"""

from __future__ import annotations

from typing import Any

SERVED = (
    "attention_mask",
    "block_indices",
    "dropout",
    "indices",
    "is_causal",
    "key",
    "position_bias",
    "query",
    "s_aux",
    "scaling",
    "sinks",
    "softcap",
    "value",
)
"""Arguments of `lowbit_attention` that affect its result."""

_FLASH = "a hint to FlashAttention's kernels, the result is the same"
_PACKED = "the mask separates packed sequences; without one, more than one sequence is refused"
_MODEL = "meant for the model around the attention"
_IMAGES = "sizes of images, for the model around the attention; positions and masks are made of them there"
WITHOUT_EFFECT = {
    "deterministic": _FLASH,
    "grid_thw": _IMAGES,
    "image_sizes": _IMAGES,
    "max_length_q": _FLASH,
    "max_length_k": _FLASH,
    "cu_seq_lens_q": _PACKED,
    "cu_seq_lens_k": _PACKED,
    "sliding_window": "the mask, which the model makes for this window, hides what is before it",
    "position_ids": "queries and keys were rotated, and the mask made, by them",
    "seq_idx": "numbers of packed sequences, for state space layers beside the attention",
    "input_ids": _MODEL,
    "logits_to_keep": _MODEL,
    "num_items_in_batch": _MODEL,
    "output_hidden_states": _MODEL,
    "output_router_logits": _MODEL,
    "return_dict": _MODEL,
    "use_cache": _MODEL,
}
"""Arguments that transformers models pass along and that have no effect here, with the reason."""

REFUSED = {
    "cache": 'a paged cache of continuous batching needs an implementation of transformers ("paged|sdpa")',
    "output_attentions": (
        'attn_implementation="lowbit" never holds the attention weights (output_attentions=True); use "eager"'
    ),
}
"""Unsupported arguments that would change the result, with the reason."""


def check(attention_mask: Any, others: dict[str, Any]) -> None:
    """Raise an error for any argument in ``others`` that is not supported and could change the result.

    Raises:
        NotImplementedError: an argument is known but not supported.
        ValueError: an argument is unknown, or describes packed sequences that no mask separates.
    """
    for name, value in others.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name not in REFUSED:
            raise ValueError(
                f'attn_implementation="lowbit": {name} must be None, got {_told(value)}: it may change the result, '
                f"and is none of the arguments known here ({', '.join(sorted({*SERVED, *WITHOUT_EFFECT}))})"
            )
        if value is not False:
            raise NotImplementedError(f"{name}: {REFUSED[name]}")
    if attention_mask is None:
        _check_packed(others.get("cu_seq_lens_q"))


def _check_packed(ends: Any) -> None:
    if ends is not None and len(ends) > 2:
        raise ValueError(
            f'attn_implementation="lowbit": cu_seq_lens_q names {len(ends) - 1} packed sequences, which no mask '
            "separates; give the model position_ids that begin anew with each, and no attention_mask"
        )


def _told(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value)[:40] if shape is None else f"{type(value).__name__} of shape {list(shape)}"
