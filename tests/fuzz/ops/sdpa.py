# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention, and the op below it (a mask with causal): masks, layouts, heads, lengths of 0, derivatives."""

from __future__ import annotations

from ..choices import Choices
from ..tensors import EXTREMES, INFINITY, attention_inputs, booleans, header, layout, normal, under

_LENGTHS = (5, 1, 2, 16, 17, 33, 64, 0, 130)
_EXTREME = tuple(value for value in EXTREMES if value != INFINITY)


def generate(choices: Choices) -> str:
    c = choices
    op = c.pick("sdpa", "sdpa", "sdpa", "attention")
    dtype = c.pick("float32", "float32", "bfloat16", "float16", "float64")
    batch, kv_heads, group = c.pick(1, 2, 0, 1, 2), c.pick(1, 2, 3, 4, 0), c.pick(1, 1, 2, 4)
    heads = kv_heads * group
    if c.chance(5):
        heads, group = 0, 0
    queries, keys = c.pick(*_LENGTHS), c.pick(*_LENGTHS)
    columns = c.pick(8, 1, 16, 17, 3, 0)
    columns = max(columns, 1) if op == "attention" else columns
    order = c.pick(0, 1, 1, 2)
    sizes = (batch, heads, kv_heads, queries, keys, columns)
    text = header(c) + attention_inputs(c, sizes, dtype, 70 if order else 0)
    options = []
    kind = c.pick("none", "bool", "float", "rows", "columns", "rows")
    causal = c.chance(30 if op == "sdpa" else 60)
    if kind != "none" and not (causal and op == "sdpa" and c.chance(90)):
        text += _mask(c, kind, (batch, heads, queries, keys), dtype, order > 0)
        options.append("mask" if op == "attention" else "attn_mask=mask")
    if causal:
        options.append("causal=True" if op == "attention" else "is_causal=True")
    if c.chance(20):
        options.append(f"scale={c.pick('1.0', '0.0', '-0.5', '20.0')}")
    if op == "sdpa" and group != 1:
        options.append("enable_gqa=True")
    if order:
        options.append(f"order={order}")
        options.append(f"how={c.pick('grad', 'create_graph', 'func')!r}")
    if op == "sdpa" and c.chance(15):
        options.append("installed=True")
    options += under(c, 10, "default dtype bfloat16")
    return f"{text}check.{op}({', '.join(['q', 'k', 'v', *options])})\n"


def _mask(c: Choices, kind: str, full: tuple[int, ...], dtype: str, gradients: bool) -> str:
    shape = [size if c.chance(60) else 1 for size in full]
    if kind == "bool":
        text = f"mask = {layout(c, booleans, shape)}\n"
        rows = c.chance(30)
        return text + (f"mask = mask.clone()\nmask[..., {c.below(max(shape[2], 1))}:, :] = False\n" if rows else "")
    dtype = c.pick("float32", dtype) if dtype != "float64" else c.pick("float64", "float32")
    text = f"mask = ({layout(c, lambda sizes: normal(sizes, dtype), shape)}).clone()\n"
    value = c.pick(*_EXTREME)
    if dtype == "float16" or (dtype == "bfloat16" and "1e" in value):
        value = f"torch.finfo(torch.{dtype}).{c.pick('min', 'max')}"
    elif dtype == "bfloat16" and "finfo" in value:
        value = value.replace("float32", "bfloat16")
    if kind == "rows":
        text += f"mask[..., {c.below(max(shape[2], 1))}:, :] = {value}\n"
    elif kind == "columns":
        text += f"mask[..., {c.below(max(shape[3], 1))}:] = {value}\n"
    return text + ("mask.requires_grad_()\n" if gradients and c.chance(50) else "")
