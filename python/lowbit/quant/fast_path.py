# SPDX-License-Identifier: Apache-2.0
"""Keep torch's encoder layers from reading a packed weight, or a float one whose layer computes otherwise.

In inference nn.TransformerEncoderLayer hands linear1.weight and linear2.weight to one fused float op, and
nn.TransformerEncoder turns padded batches into nested tensors for it. Both ask attributes of theirs first, which hold
nothing else: clear these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


def disable_encoder_fast_path(model: nn.Module) -> str | None:
    """Clear the fast path of every encoder layer with a layer of ours; return a note for the report, or None."""
    count = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _has_ours(module):
            module.activation_relu_or_gelu = 0
            count += 1
        elif isinstance(module, nn.TransformerEncoder) and any(map(_has_ours, module.modules())):
            module.use_nested_tensor = False
    if not count:
        return None
    return (
        f"torch's fused float inference path was turned off in {count} nn.TransformerEncoderLayer: "
        "it reads linear1.weight and linear2.weight directly"
    )


@contextlib.contextmanager
def without_encoder_fast_path(model: nn.Module) -> Iterator[None]:
    """Turn the fast path of every encoder layer of ``model`` off for a while, so that its linear layers are called."""
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


def _has_ours(module: nn.Module) -> bool:
    classes = (cls for child in module.children() for cls in type(child).__mro__)
    return any(cls.__module__.startswith("lowbit.") for cls in classes)
