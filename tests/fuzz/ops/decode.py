# SPDX-License-Identifier: Apache-2.0
"""decode: a few queries over float keys or codes, in both orders of memory and with stride 0."""

from __future__ import annotations

from ..choices import Choices
from ..tensors import EXTREMES, INFINITY, booleans, header, layout, normal, under


def generate(choices: Choices) -> str:
    c = choices
    batch, kv_heads, group = c.pick(1, 2), c.pick(1, 2, 3, 4), c.pick(1, 2, 4, 7)
    heads, length, keys = kv_heads * group, c.pick(1, 1, 2, 5), c.pick(1, 5, 33, 100, 255, 257, 300)
    e, ev = c.pick(32, 64, 8, 1, 40, 100), c.pick(32, 16, 17, 64)
    dtype = c.pick("float32", "bfloat16", "float16")
    codes = c.pick("", "int8", "int4")
    kept = c.pick("float32", dtype) if codes else c.pick("float32", "bfloat16", "float16")
    text = header(c) + f"q = {normal((batch, heads, length, e), dtype)}\n"
    for name, shape in {"k": (batch, kv_heads, keys, e), "v": (batch, kv_heads, keys, ev)}.items():
        text += f"{name} = {_dense_rows(c, shape, kept)}\n"
    options = []
    if codes:
        options += [f"codes={codes!r}", f"memory={c.pick('head-major', 'token-major')!r}"]
        options += [f"expanded={c.pick('tokens', 'heads', 'codes')!r}"] if c.chance(40) else []
        options += ["shared=True"] if c.chance(15) else []
    if c.chance(50):
        options += ["causal=True", f"position={c.pick(keys - length, 0, max(keys - length - 3, 0))}"]
        options += [f"window={c.pick(1, 4, 17, keys)}"] if c.chance(60) else []
    kind = c.pick("none", "bool", "rows", "float")
    if kind != "none":
        text += _mask(c, kind, (batch, heads, length, keys))
        options.append("mask=mask")
    if c.chance(15):
        options.append(f"sink=torch.randn({heads})")
    options += under(c, 10)
    return f"{text}check.decode({', '.join(['q', 'k', 'v', *options])})\n"


def _dense_rows(c: Choices, shape: tuple[int, ...], dtype: str) -> str:
    """Any layout whose last dimension is dense: what the op takes."""
    batch, heads, length, columns = shape
    return c.pick(
        normal(shape, dtype),
        f"{normal((batch, length, heads, columns), dtype)}.transpose(1, 2)",
        f"{normal((batch, heads, length + 3, columns + 8), dtype)}[:, :, 2:{2 + length}, 3:{3 + columns}]",
        f"{normal((batch, heads, 1, columns), dtype)}.expand{shape}",
        f"{normal((batch, 1, length, columns), dtype)}.expand{shape}",
    )


def _mask(c: Choices, kind: str, full: tuple[int, ...]) -> str:
    shape = [size if c.chance(60) else 1 for size in full]
    if kind == "bool":
        return f"mask = ({layout(c, booleans, shape)}).expand{full}\n"
    text = f"mask = ({layout(c, normal, shape)}).clone()\n"
    if kind == "rows":
        value = c.pick(*(value for value in EXTREMES if value not in ("-1e9", INFINITY)))
        text += f"mask[..., {c.below(shape[2])}:, :] = {value}\n"
    return text + f"mask = mask.expand{full}\n"
