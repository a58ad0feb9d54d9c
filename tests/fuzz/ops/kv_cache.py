# SPDX-License-Identifier: Apache-2.0
"""QuantizedKVCache: a random sequence of append, attend, crop and reorder over two layers, some of which must be refused."""

from __future__ import annotations

from ..choices import Choices
from ..tensors import header, layout, normal


def generate(choices: Choices) -> str:
    c = choices
    heads, batch = c.pick(1, 2, 3), c.pick(1, 2)
    e, ev = c.pick(32, 64, 8, 40), c.pick(32, 16, 64)
    tokens = [0, 0]
    lines = []
    for _ in range(c.between(1, 7)):
        kind = c.pick("append", "append", "attend", "attend", "crop", "reorder", "bad append")
        layer = c.below(2)
        if kind in ("append", "bad append"):
            length = c.pick(1, 5, 33, 257)
            sizes = [batch, heads, e, ev]
            if kind == "bad append":
                sizes[c.below(4)] = c.pick(5, 0, 513, 600)
            dtype = c.pick("float32", "bfloat16", "float16")
            key = layout(c, lambda sizes: normal(sizes, dtype), (sizes[0], sizes[1], length, sizes[2]))
            value = layout(c, lambda sizes: normal(sizes, dtype), (sizes[0], sizes[1], length, sizes[3]))
            lines.append(f'("append", {layer}, {key}, {value})')
            tokens[layer] += length if sizes == [batch, heads, e, ev] else 0
        elif kind == "attend":
            queries = min(c.pick(1, 2, 5, 70), tokens[layer]) or 1
            options = [f"'window': {c.pick(1, 4, 5, 33)}"] if c.chance(50) else []
            options += ["'causal': False"] if c.chance(20) else []
            query = normal((batch, heads * c.pick(1, 2, 4), queries, e), c.pick("float32", "bfloat16", "float16"))
            lines.append(f'("attend", {layer}, {query}, {{{", ".join(options)}}})')
        elif kind == "crop":
            keep = c.pick(0, 1, 4, -1, -3, 30)
            lines.append(f'("crop", {keep})')
            lengths = [length for length in tokens if length]
            if lengths and all(abs(keep) <= length for length in lengths):
                tokens = [length and (keep if keep >= 0 else length + keep) for length in tokens]
        else:
            lines.append(f'("reorder", torch.tensor({[c.below(batch) for _ in range(batch)]}))')
    body = "".join(f"    {line},\n" for line in lines)
    return f"{header(c)}\noperations = [\n{body}]\ncheck.cache({c.pick('int8', 'int4')!r}, operations)\n"
