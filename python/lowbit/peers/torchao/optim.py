# SPDX-License-Identifier: Apache-2.0
"""``torchao.optim`` on lowbit: the same classes with the same arguments."""

from __future__ import annotations

from typing import Any

from lowbit.formats.torchao import missing
from lowbit.optim import Adam4bit, Adam8bit, AdamFp8, AdamW, AdamW4bit, AdamW8bit, AdamWFp8

_AdamW = AdamW

__all__ = ["Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "_AdamW"]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
