# SPDX-License-Identifier: Apache-2.0
"""Optimizers against torch's: every class, state format, shape (0 too), layout, dtype and default dtype."""

from __future__ import annotations

from ..choices import Choices
from ..tensors import header, layout, normal

NAMES = ("AdamW", "AdamW8bit", "Adam8bit", "SGD8bit", "Lion8bit", "AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8")
SHAPES = ("(64,)", "(5, 7)", "(1,)", "()", "(0,)", "(3, 0)", "(17, 33)", "(2, 3, 5)", "(4097,)", "(64, 65)", "(0, 5)")
MUON = ("Muon", "Muon8bit")
MATRICES = ("(5, 7)", "(17, 33)", "(33, 17)", "(64, 65)", "(1, 9)", "(3, 0)", "(2, 6, 5)", "(300, 20)", "(20, 300)")


def parameters(c: Choices, dtype: str, shapes: tuple[str, ...] = SHAPES) -> str:
    made = []
    for _ in range(c.between(1, 3)):
        shape = eval(c.pick(*shapes))
        text = layout(c, lambda sizes: normal(sizes, dtype), shape) if c.chance(30) else normal(shape, dtype)
        made.append(text if "expand" not in text else normal(shape, dtype))  # no step could serve it: refused, tests/optim
    return "params = [\n" + "".join(f"    {text},\n" for text in made) + "]\n"


def options(c: Choices, name: str) -> str:
    """Options that a class takes, as keywords."""
    made = [f"min_8bit_size={c.pick(0, 0, 0, 4096)}"]
    if c.chance(40):
        made.append(f"block_size={c.pick(32, 64, 256, 4096)}")
    if c.chance(30):
        made.append(f"weight_decay={c.pick(0.0, 0.1)}")
    if c.chance(30):
        made.append(f"lr={c.pick('0.01', '0.1', 'torch.tensor(0.01)')}")
    if c.chance(20):
        made.append("maximize=True")
    if name.startswith("Adam") and c.chance(25):
        made.append("amsgrad=True")
    if name.startswith("SGD") and c.chance(50):
        made.append(c.pick("nesterov=True", "momentum=0.0"))
    if name in MUON:  # bfloat16 steps are compared with torch's in tests/optim
        made += ["ns_dtype=torch.float32", f"nesterov={c.pick(True, False)}", f"ns_steps={c.pick(5, 5, 1, 0)}"]
    if c.chance(15) and name != "AdamW":
        made.append(f"optim_bits={c.pick(32, 8, 4, 16)}")
    return ", ".join(made)


def generate(choices: Choices) -> str:
    c = choices
    name, dtype = c.pick(*NAMES, *MUON), c.pick("float32", "bfloat16", "float16")
    under = c.pick("", "", "", "default dtype float64", "default dtype bfloat16", "default device meta", "threads 2")
    master = ", master='bf16+8'" if dtype != "float16" and c.chance(30) else ""
    shapes = MATRICES if name in MUON else SHAPES
    return f"{header(c)}{parameters(c, dtype, shapes)}check.trains({name!r}, params, {options(c, name)}{master}, under={under!r})\n"
