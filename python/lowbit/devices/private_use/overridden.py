# SPDX-License-Identifier: Apache-2.0
"""Ops that torch does not pass to the fallback, because it decomposes them or calls them by another name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lowbit.devices.private_use.fallback import fallback

aten = torch.ops.aten


def register(library: torch.library.Library) -> None:
    """Register the kernels in ``library`` (for `aten`)."""
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    library.impl("native_layer_norm", partial(fallback, aten.native_layer_norm.default), "PrivateUse1")
    library.impl("convolution_overrideable", _convolution, "PrivateUse1")
    library.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")


def _attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Any:
    """Compute attention by plain ops: torch finds fused ones in a C++ table, which Python cannot fill."""
    return aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> Any:
    return fallback(
        aten.convolution.default, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )


def _convolution_backward(
    grad, x, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask
) -> Any:
    return fallback(
        aten.convolution_backward.default,
        grad,
        x,
        weight,
        None,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )
