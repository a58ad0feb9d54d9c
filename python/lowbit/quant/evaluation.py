# SPDX-License-Identifier: Apache-2.0
"""Running a model to observe the inputs of its layers: the arguments of a call, and evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for an input: a tensor is the only argument, a tuple or list holds the
    positional arguments, a mapping the keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return tuple(example) if isinstance(example, (tuple, list)) else (example,), {}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module of ``model`` into evaluation mode within the block, and restore each module's mode after it."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def without_encoder_fast_path(model: nn.Module) -> Iterator[None]:
    """Disable torch's fast path for all encoder layers of ``model`` within the block, so that linear layers are
    called."""
    kept = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for cls, name in (
            (nn.TransformerEncoderLayer, "activation_relu_or_gelu"),
            (nn.TransformerEncoder, "use_nested_tensor"),
        )
        if isinstance(module, cls)
    ]
    try:
        for module, name, value in kept:
            setattr(module, name, type(value)(0))
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
