# SPDX-License-Identifier: Apache-2.0
"""Notify other packages when any function has packed layers of a model or made them float again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

OBSERVERS: list[Callable[[nn.Module], None]] = []
"""Functions of a model whose layers have changed: added by the integration of the library that the model is of."""


@contextlib.contextmanager
def changing_layers(model: nn.Module) -> Iterator[None]:
    """Tell the observers behind the block, also behind an error or Ctrl-C in it: they look at the layers that are
    there, so what they note is true of a model that is changed in part, too."""
    try:
        yield
    finally:
        for tell in OBSERVERS:
            tell(model)
