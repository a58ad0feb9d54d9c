# SPDX-License-Identifier: Apache-2.0
"""The op linear in all formats, layouts of x and bias, gradients, very long sums; QuantLinear with a wrong number of features."""

from __future__ import annotations

from lowbit import testing

from ..choices import Choices
from ..tensors import header, layout, normal, under

_FORMATS = tuple(testing.format_cases())


def generate(choices: Choices) -> str:
    c = choices
    kind = c.pick("call", "call", "call", "long", "features")
    return header(c) + {"call": _call, "long": _long, "features": _features}[kind](c)


def _call(c: Choices) -> str:
    format, group_size, mapping, x_format = c.pick(*_FORMATS)
    m, n = c.pick(1, 2, 5, 0, 8, 16, 17, 33), c.pick(1, 7, 16, 17, 33, 48)
    k = c.pick(32, 1, 3, 31, 33, 64, 65, 100, 128, 257)
    dtype = c.pick("float32", "bfloat16", "float16")
    x = layout(c, lambda sizes: normal(sizes, dtype), [*c.pick((), (1,), (2,)), m, k])
    options = [f"{group_size=}", f"{mapping=}", f"{x_format=}"]
    if c.chance(60):
        bias_dtype = c.pick("float32", dtype, "bfloat16", "float16")
        bias = layout(c, lambda sizes: normal(sizes, bias_dtype), [n])
        options.append(f"bias=({bias}){'.requires_grad_()' if c.chance(40) else ''}")
    if c.chance(40):
        options.append(f"activation={c.pick(*testing.ACTIVATIONS)!r}")
    for name in ("mul", "add"):
        if c.chance(25):
            options.append(f"{name}={c.pick('1', '2')}")
    if c.chance(40):
        options.append("x_gradient=True")
    options += under(c, 15, "inference mode")
    values = c.pick("normal", "normal", "ones", "large", "outliers")
    return f"check.linear({x}, {n}, {format!r}, {', '.join(options)}, values={values!r})\n"


def _long(c: Choices) -> str:
    """Sums so long that they may leave their integers: x and w of one sign."""
    format = c.pick("int8", "int4")
    group_size = c.pick(0, 0, 32, 256)
    x_format = c.pick("int8_row", "int8_row_asymmetric", "int8_group", "float")
    k = c.pick(65_536, 132_000, 140_000, 150_016, 200_000)
    return f"check.large_k({k}, {c.pick(1, 17)}, {c.pick(1, 2, 5)}, {format!r}, {group_size}, {x_format!r}, {c.pick('ones', 'minus', 'random')!r})\n"


def _features(c: Choices) -> str:
    config = c.pick(
        "lowbit.Int8WeightOnlyConfig()", "lowbit.Int4WeightOnlyConfig(group_size=32)", "lowbit.Int8DynamicActivationInt8WeightConfig()",
        "lowbit.Int8DynamicActivationInt4WeightConfig(group_size=32)", "lowbit.FloatWeightConfig(torch.bfloat16)",
    )  # fmt: skip
    k = c.pick(64, 32, 96, 384, 128)
    wrong = c.pick(1, -1, 63, -63, 64, -31, 32, 7)
    return f"check.feature_size({config}, {k}, {max(k + wrong, 1)}, gradient={c.chance(30)})\n"
