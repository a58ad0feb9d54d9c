# SPDX-License-Identifier: Apache-2.0
"""Running a model to look at its linear layers' inputs: how an input becomes a call, and the state for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that an input stands for: a tensor is the one argument, a tuple or list the positional
    ones, a mapping the keyword ones."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return tuple(example) if isinstance(example, (tuple, list)) else (example,), {}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Hold every module of ``model`` in evaluation mode for a while; each gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
