# SPDX-License-Identifier: Apache-2.0
"""flex_attention: one call with a random score_mod, mask_mod, or both."""

from __future__ import annotations

import re

from ..choices import Choices
from ..expressions import Mod
from ..tensors import attention_inputs, header, under

_LENGTHS = (16, 1, 2, 5, 17, 33, 64, 24, 128, 136)


def generate(choices: Choices) -> str:
    c = choices
    batch, kv_heads, group = c.pick(1, 2, 1, 3), c.pick(1, 2, 3), c.pick(1, 1, 2, 4)
    queries, keys, columns = c.pick(*_LENGTHS), c.pick(*_LENGTHS), c.pick(8, 1, 16, 17, 3)
    dtype = c.pick("float32", "float32", "float32", "bfloat16", "float16", "float64")
    heads = kv_heads * group
    gradients = c.chance(50)
    sizes = {"b": batch, "h": heads, "i": queries, "j": keys}
    text = header(c) + attention_inputs(c, (batch, heads, kv_heads, queries, keys, columns), dtype, 60 * gradients)
    arguments = ["q", "k", "v"]
    which = c.pick("score", "score", "mask", "both")
    if which != "mask":
        text += _function(mod := Mod(c, sizes, gradients), "score_mod", "s, b, h, i, j", mod.score(), "captured")
        arguments += ["make_score_mod", "captured"]
    if which != "score":
        text += _function(mod := Mod(c, sizes), "mask_mod", "b, h, i, j", mod.mask(), "mask_captured")
        body = text.rpartition("return mask_mod")[0].rpartition("return ")[2]
        per = f"{batch}, {heads}" if c.chance(50) or re.search(r"\b[bh]\b", body) else "None, None"
        block = c.pick("16", "128", "(32, 16)", "(1, 7)")
        arguments += ["make_mask=make_mask_mod", "mask_captured=mask_captured", f"per=({per})", f"block={block}"]
    if c.chance(20):
        arguments.append(f"scale={c.pick('1.0', '0.0', '-0.5', '3.0')}")
    if gradients:
        arguments.append("gradients=True")
    arguments += under(c, 15, "default dtype bfloat16")
    return f"{text}\ncheck.flex({', '.join(arguments)})\n"


def _function(mod: Mod, name: str, arguments: str, body: str, captured: str) -> str:
    names = ", ".join(f"t{index}" for index in range(len(mod.captured)))
    made = "".join(f"    {text},\n" for text in mod.captured)
    return f"\n{captured} = [\n{made}]\n\n\ndef make_{name}({names}):\n    def {name}({arguments}):\n        return {body}\n\n    return {name}\n\n"
