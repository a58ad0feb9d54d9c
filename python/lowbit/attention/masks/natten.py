# SPDX-License-Identifier: Apache-2.0
"""Neighborhood attention over an image (arXiv 2204.07143): each pixel sees the window around it, which is shifted
inside at the edges."""

from __future__ import annotations

from torch import Tensor

from lowbit.score.mod import MaskMod


def natten(height: int, width: int, kernel_height: int, kernel_width: int | None = None) -> MaskMod:
    """Return the mask over ``height * width`` pixels in row-major order.

    Args:
        height: the rows of the image.
        width: the columns of the image.
        kernel_height: the rows of the window, odd and at most ``height``.
        kernel_width: the columns of the window, odd and at most ``width``; by default kernel_height.

    Raises:
        ValueError: a kernel size is even or larger than the image.
    """
    kernel_width = kernel_height if kernel_width is None else kernel_width
    for name, kernel, size in (("kernel_height", kernel_height, height), ("kernel_width", kernel_width, width)):
        if kernel % 2 == 0 or not 1 <= kernel <= size:
            raise ValueError(f"natten: {name} must be odd and in 1..{size}, got {name}={kernel}")
    rows, columns = kernel_height // 2, kernel_width // 2

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = (q_idx // width).clamp(rows, height - 1 - rows)
        column = (q_idx % width).clamp(columns, width - 1 - columns)
        return ((row - kv_idx // width).abs() <= rows) & ((column - kv_idx % width).abs() <= columns)

    return MaskMod(mask, f"natten({height}x{width}, {kernel_height}x{kernel_width})")
