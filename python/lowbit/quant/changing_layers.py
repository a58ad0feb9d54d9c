# SPDX-License-Identifier: Apache-2.0
"""Notification of other packages after layers of a model were packed or dequantized."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

OBSERVERS: list[Callable[[nn.Module], None]] = []
"""Functions that are called with a model whose layers have changed; each integration of a library adds its own."""


@contextlib.contextmanager
def changing_layers(model: nn.Module) -> Iterator[None]:
    """Call the observers at the end of the block, even after an error or Ctrl-C. They inspect the current layers, so
    they are right about a partly changed model too."""
    try:
        yield
    finally:
        for tell in OBSERVERS:
            tell(model)
