# SPDX-License-Identifier: Apache-2.0
"""Texts of tensors: a shape in any layout that torch has (transposed, offset, stepped, expanded), any dtype, plain or extreme values."""

from __future__ import annotations

from collections.abc import Sequence

from .choices import Choices

FLOATS = ("float32", "bfloat16", "float16")
INFINITY = "float('inf')"
EXTREMES = (
    "0.0", "-0.0", "1.0", "-1.0", "2.0", "-1e4", "-1e9", "1e30", "-1e30", "-1e38", "-2.4e38", "torch.finfo(torch.float32).min",
    "torch.finfo(torch.float32).max", "float('-inf')", INFINITY, "1e-30", "1e-45",
)  # fmt: skip


def header(choices: Choices) -> str:
    """The first lines of a case."""
    return f"import torch\nimport lowbit\nfrom tests.fuzz import check\n\ntorch.manual_seed({choices.below(10000)})\n"


def under(choices: Choices, percent: int, *settings: str) -> list[str]:
    """The option of a call that is made under one of these settings of torch, in so many of 100 cases."""
    settings = ("default dtype float64", "default device meta", "threads 2", *settings)
    return [f"under={choices.pick(*settings)!r}"] if choices.chance(percent) else []


def attention_inputs(choices: Choices, sizes: Sequence[int], dtype: str, gradients: int) -> str:
    """Lines that make q, k and v in any layout, from sizes of (batch, heads, heads of k, queries, keys, columns); each
    wants a gradient in so many of 100 cases."""
    batch, heads, kv_heads, queries, keys, columns = sizes
    shapes = {
        "q": (heads, queries, columns),
        "k": (kv_heads, keys, columns),
        "v": (kv_heads, keys, choices.pick(columns, 5)),
    }
    text = ""
    for name, shape in shapes.items():
        made = layout(choices, lambda sizes: normal(sizes, dtype), (batch, *shape))
        text += f"{name} = ({made}){'.requires_grad_()' if gradients and choices.chance(gradients) else ''}\n"
    return text


def normal(shape: Sequence[int], dtype: str = "float32") -> str:
    return f"torch.randn({_sizes(shape)}, dtype=torch.{dtype})"


def integers(shape: Sequence[int], low: int, high: int, dtype: str = "int64") -> str:
    return f"torch.randint({low}, {max(high, low + 1)}, ({_sizes(shape)}{',' if len(shape) == 1 else ''}), dtype=torch.{dtype})"


def halves(shape: Sequence[int], dtype: str = "float32") -> str:
    """Small multiples of a half: every float dtype holds them, and sums and products of a few of them, exactly."""
    return f"({integers(shape, -6, 7)} / 2).to(torch.{dtype})"


def booleans(shape: Sequence[int]) -> str:
    return f"(torch.rand({_sizes(shape)}, dtype=torch.float32) > 0.4)"


def layout(choices: Choices, make: object, shape: Sequence[int], *, expand: bool = True) -> str:
    """A tensor of this shape, from ``make(shape of the memory)``, in a random layout."""
    shape, rank = list(shape), len(shape)
    if not callable(make):
        raise TypeError("layout: make must be callable")
    kind = choices.pick("dense", "dense", "dense", "transposed", "heads last", "offset", "step", "expanded", "permuted")
    at = choices.below(rank) if rank else 0
    if kind == "transposed" and rank >= 2:
        return f"{make([*shape[:-2], shape[-1], shape[-2]])}.transpose(-1, -2)"
    if kind == "heads last" and rank >= 3:
        return f"{make([*shape[:-3], shape[-2], shape[-3], shape[-1]])}.transpose(-2, -3)"
    if kind == "permuted" and rank >= 2:
        return f"{make(shape[::-1])}.permute({_sizes(range(rank)[::-1])})"
    if kind == "offset" and rank:
        index = ["slice(None)"] * rank
        index[at] = f"slice(2, {2 + shape[at]})"
        return f"{make([*shape[:at], shape[at] + 3, *shape[at + 1 :]])}[{', '.join(index)}]"
    if kind == "step" and rank:
        index = ["slice(None)"] * rank
        index[at] = f"slice(None, {2 * shape[at]}, 2)"
        return f"{make([*shape[:at], 2 * shape[at] + 1, *shape[at + 1 :]])}[{', '.join(index)}]"
    if kind == "expanded" and rank and expand:
        return f"{make([*shape[:at], 1, *shape[at + 1 :]])}.expand({_sizes(shape)})"
    return str(make(shape))


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) if len(sizes) else "()"
