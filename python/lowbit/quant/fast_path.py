# SPDX-License-Identifier: Apache-2.0
"""Keep torch's encoder layers from reading a packed weight.

In inference nn.TransformerEncoderLayer hands linear1.weight and linear2.weight to one fused float op, and
nn.TransformerEncoder
turns padded batches into nested tensors for it. Both ask attributes of theirs first, which hold nothing else: clear
these.
"""

from __future__ import annotations

from torch import nn

from lowbit.quant.quant_linear import QuantLinear


def disable_encoder_fast_path(model: nn.Module) -> str | None:
    """Clear the fast path of every encoder layer with a quantized child; return a note for the report, or None."""
    count = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _is_quantized(module):
            module.activation_relu_or_gelu = 0
            count += 1
        elif isinstance(module, nn.TransformerEncoder) and any(map(_is_quantized, module.modules())):
            module.use_nested_tensor = False
    if not count:
        return None
    return (
        f"torch's fused float inference path was turned off in {count} nn.TransformerEncoderLayer: "
        "it reads linear1.weight and linear2.weight directly"
    )


def _is_quantized(module: nn.Module) -> bool:
    return any(isinstance(child, QuantLinear) for child in module.children())
