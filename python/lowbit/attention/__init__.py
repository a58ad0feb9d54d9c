# SPDX-License-Identifier: Apache-2.0
"""Attention: scaled_dot_product_attention, flex_attention with BlockMask, ready-made masks and mods, and decoding with
a quantized cache.

Submodules are loaded on first use, like the names of `lowbit`.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "scaled_dot_product_attention": "sdpa",
    "flex_attention": "flex",
    "AuxRequest": "flex",
    "AuxOutput": "flex",
    "BlockMask": "block_mask",
    "create_block_mask": "block_mask",
    "create_mask": "block_mask",
    "and_masks": "block_mask",
    "or_masks": "block_mask",
    "noop_mask": "block_mask",
    "plot": "picture",
    "install": "installation",
    "uninstall": "installation",
    "installed": "installation",
}
_ROOMS = ("masks", "mods")
_FILES = ("kv_layer",)
__all__ = [*_HOME, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in (*_ROOMS, *_FILES):
        return importlib.import_module(f"lowbit.attention.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'lowbit.attention' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"lowbit.attention.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
