# SPDX-License-Identifier: Apache-2.0
"""The masks and mods of the library against what their papers (or transformers) say."""

from __future__ import annotations

from ..choices import Choices
from ..tensors import header

_WINDOW = "lambda i, j: (j <= i) & (j > i - {0})"


def generate(choices: Choices) -> str:
    c = choices
    length = c.pick(17, 16, 1, 33, 40)
    kind = c.pick("mask", "mask", "alibi", "softcap")
    if kind == "alibi":
        return f"{header(c)}check.alibi({c.pick(8, 4, 1, 12, 6, 3, 7, 16, 20)}, {length})\n"
    if kind == "softcap":
        return f"{header(c)}check.softcap({c.pick(1.0, 20.0, 50.0, 0.5)}, {length})\n"
    w, d, p = c.pick(1, 2, 4, 5, 16, 40), c.pick(1, 2, 3), c.pick(0, 1, 5, 50)
    name, wanted = c.pick(
        (f"sliding_window({w})", _WINDOW.format(w)),
        ("causal", "lambda i, j: j <= i"),
        (f"dilated({w}, {d})", f"lambda i, j: ((i - j).abs() <= {w}) & ((i - j) % {d} == 0)"),
        (f"prefix_lm({p})", f"lambda i, j: (j <= i) | (j < {p})"),
        (f"document(torch.arange({length}) // {d + 1})", f"lambda i, j: i // {d + 1} == j // {d + 1}"),
        (f"block_diffusion({max(length // 2, 1)}, {d})", f"check.block_diffusion({max(length // 2, 1)}, {d})"),
    )  # fmt: skip
    return f"{header(c)}check.mask(lowbit.attention.masks.{name}, {length}, {wanted}, {name.partition('(')[0]!r})\n"
