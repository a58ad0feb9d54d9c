# SPDX-License-Identifier: Apache-2.0
"""Random score_mods and mask_mods as text.

Expressions have a type: int, bool, exact (a float that every dtype holds exactly, or inf) or float. Ops that jump (comparisons,
floor, remainder) take ints and exact floats alone: of a rounded score they could be anything. Captured tensors are collected on the way,
with the text that makes each; the mod sees them as t0, t1, ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .choices import Choices
from .tensors import EXTREMES, INFINITY, booleans, halves, integers, layout, normal

_PAIRS = ("{} + {}", "{} - {}", "torch.maximum({}, {})", "torch.minimum({}, {})", "{} * {}")
_INT_PAIRS = (*_PAIRS, "{} & {}", "{} | {}", "{} ^ {}")
_TRUNC, _FLOOR = (f"torch.div({{}}, {{}}, rounding_mode='{mode}')" for mode in ("trunc", "floor"))
_INT_BY = ("{} // {}", "{} % {}", _TRUNC, "torch.fmod({}, {})", "torch.remainder({}, {})")
_COMPARISONS = ("{} >= {}", "{} < {}", "{} <= {}", "{} > {}", "{} == {}", "{} != {}")
_SMOOTH = (
    "torch.tanh({})", "-{}", "{} * 0.5", "torch.sigmoid({})", "torch.sin({})", "torch.cos({})", "torch.erf({})", "torch.atan({})",
    "torch.exp(-({}) ** 2)", "torch.log1p(({}) ** 2)", "torch.sqrt(1 + ({}) ** 2)", "torch.nn.functional.silu({})",
    "torch.nn.functional.gelu({})", "({}).abs()", "torch.relu({})", "torch.clamp({}, -2.0, 2.0)", "torch.expm1(torch.tanh({}))",
    "torch.square({}) * 0.1", "torch.exp2(torch.tanh({}))", "({}).float()", "torch.rsqrt(1.5 + ({}) ** 2)", "torch.nn.functional.softplus({})",
    "torch.nn.functional.logsigmoid({})", "torch.nn.functional.leaky_relu({}, 0.1)", "torch.logaddexp({}, torch.zeros_like({}))",
)  # fmt: skip
_SMOOTH_PAIRS = (*_PAIRS, "{} / (1.5 + ({}) ** 2)")
_DIVISIONS = ("torch.floor_divide({}, {})", *_INT_BY[3:], "{} // {}", "{} % {}")
_EXACT_PAIRS = (*_DIVISIONS, *_PAIRS, "{} / {}", _FLOOR, _TRUNC, "torch.pow({}, {})")
_EXACT_ONE = (
    *(f"torch.{name}({{}})" for name in ("floor", "ceil", "round", "trunc", "sign", "square")), "({}).abs()", "-({})",
)  # fmt: skip
_INFINITE = f"torch.tensor({INFINITY})"
_EXACT_EXTREMES = (*(value for value in EXTREMES if "inf" in value or value in ("0.0", "-0.0")), *EXTREMES[:5])


@dataclass
class Mod:
    """One mod being written: sizes of b, h, i, j, and the captured tensors so far."""

    choices: Choices
    sizes: dict[str, int]
    gradients: bool = False
    captured: list[str] = field(default_factory=list)

    def capture(self, text: str, floating: bool) -> str:
        if floating and self.gradients and self.choices.chance(50):
            text = f"({text}).requires_grad_()"
        self.captured.append(text)
        return f"t{len(self.captured) - 1}"

    # -- ints

    def int(self, depth: int) -> str:
        c, less = self.choices, depth - 1
        leaves = (lambda: c.pick("i", "j", "h", "b"), lambda: str(c.pick(0, 1, 2, -1, 3, 7, -5, 100)))
        if not depth:
            return c.one_of(*leaves)
        return c.one_of(
            leaves[0],
            *leaves,
            lambda: f"({c.pick(*_INT_PAIRS).format(self._int_tensor(less), self.int(less))})",
            lambda: f"({c.pick(*_INT_BY).format(self._int_tensor(less), c.pick('2', '3', '1', '-2', '7', 'torch.tensor(-3)'))})",
            lambda: self.gather("int"),
            lambda: f"({self._int_tensor(less)}).abs()",
            lambda: f"torch.where({self.bool(less)}, {self._int_tensor(less)}, {self._int_tensor(less)})",
            lambda: f"(({self._int_tensor(less)}) >> {c.between(0, 3)})",
            lambda: f"({self._int_tensor(less)}).clamp({c.between(-4, 0)}, {c.between(1, 9)})",
        )

    def _int_tensor(self, depth: int) -> str:
        sum = f"({self.choices.pick('j', 'i')} + {self.int(depth) if depth else 1})"
        return self.choices.pick("(i - j)", "i", "j", "h", sum)

    def index(self, size: int) -> str:
        """An int within -size .. size - 1."""
        c = self.choices
        names = [name for name, extent in self.sizes.items() if extent == size] or [f"({self._int_tensor(1)}) % {size}"]
        captured = (lambda: self.capture(integers((), 0, size, c.pick("int64", "int32")), False),) * 2
        return c.one_of(
            *(lambda: c.pick(*names),) * 3,
            lambda: f"{size - 1} - {c.pick(*names)}",
            lambda: f"({self._int_tensor(1)}) % {size}",
            lambda: f"-1 - {c.pick(*names)}",
            lambda: str(c.between(-size, size - 1)),
            lambda: f"({self._int_tensor(1)}).clamp(0, {size - 1})",
            *captured,
        )

    def gather(self, type: str) -> str:
        """One element of a captured tensor, by one of the ways to index."""
        c = self.choices
        rank = c.pick(2, 1, 3, 4, 0, 2)
        order = list(self.sizes.items())
        start = c.pick(2, 0, 1, 3) if rank <= 2 else 0
        shape = [(order[(start + at) % 4][1] if c.chance(80) else c.pick(1, 2, 5, 16)) or 1 for at in range(rank)]
        int_dtype, float_dtype = c.pick("int64", "int32", "int16"), c.pick("float32", "float32", "bfloat16", "float16", "float64")
        makes = {
            "int": lambda sizes: integers(sizes, -9, 10, int_dtype),
            "bool": booleans,
            "exact": halves,
            "float": lambda sizes: normal(sizes, float_dtype),
        }
        name = self.capture(layout(c, makes[type], shape), type in ("float", "exact"))
        return self.read(name, shape, type)

    def read(self, name: str, shape: list[int], type: str) -> str:
        c, rank = self.choices, len(shape)
        indices = [self.index(size) for size in shape]
        if rank == 0:
            return c.pick(name, f"{name}[()]", f"{name}.reshape(())", f"{name} * 1" if type != "bool" else name)
        joined, head = ", ".join(indices), ", ".join(indices[:-1])
        within = [f"(({index}) % {size})" for index, size in zip(indices, shape, strict=True)]
        place = " + ".join(f"{index} * {math.prod(shape[at + 1 :])}" for at, index in enumerate(within))
        flat = c.pick("flatten()", "reshape(-1)", "contiguous().view(-1)")
        ways = [
            f"{name}[{joined}]",
            f"{name}[{joined}]",
            name + "".join(f"[{index}]" for index in indices),
            f"{name}.{flat}[{place}]",
            f"{name}[..., {joined}]",
            f"{name}[None][0, {joined}]",
        ]
        if rank == 2:
            ways.append(f"{name}.t()[{indices[1]}, {indices[0]}]")
        if rank >= 2:
            sizes, rest = shape[2:] or [1], indices[2:] or ["0"]
            place = f"{within[0]} * {shape[1]} + {within[1]}"
            ways.append(f"{name}.reshape(-1, {', '.join(map(str, sizes))})[{place}, {', '.join(rest)}]")
        if rank >= 2 and shape[-1] <= 16 and type == "float":
            row = f"{name}[{head}]"
            ways.append(c.pick(f"{row}.sum()", f"{row}.mean()", f"{row}.amax()", f"torch.dot({row}, {row})"))
        return c.pick(*ways)

    # -- bools

    def bool(self, depth: int) -> str:
        c, less = self.choices, max(depth - 1, 0)
        causal_or_not = (
            lambda: "(j <= i)",
            lambda: f"({c.pick(*_COMPARISONS).format(self._int_tensor(less), self.int(less))})",
        )
        if not depth:
            return c.one_of(*causal_or_not)
        return c.one_of(
            causal_or_not[1],
            *causal_or_not,
            lambda: self.gather("bool"),
            lambda: f"({self.bool(less)} & {self.bool(less)})",
            lambda: f"({self.bool(less)} | {self.bool(less)})",
            lambda: f"(~{self.bool(less)})",
            lambda: f"({c.pick(*_COMPARISONS).format(self.gather('exact'), self.exact(less))})",
        )

    # -- floats

    def exact(self, depth: int) -> str:
        c, less = self.choices, depth - 1
        leaves = (
            lambda: self.gather("exact"),
            lambda: f"torch.tensor({c.pick('2.0', '0.0', '-1.5', '1.0', '-0.5', '-3.0')})",
            lambda: f"torch.tensor({c.pick(*_EXACT_EXTREMES)})",
        )
        if depth <= 0:
            return c.one_of(*leaves)
        return c.one_of(
            *leaves,
            lambda: f"({self._int_tensor(1)}).to(torch.float32)",
            lambda: c.pick(*_EXACT_PAIRS).format(f"({self.exact(less)})", f"({self.exact(less)})"),
            lambda: c.pick(*_EXACT_ONE).format(self.exact(less)),
            lambda: f"torch.where({self.bool(1)}, {self.exact(less)}, {self.exact(less)})",
        )

    def float(self, depth: int) -> str:
        c, less = self.choices, depth - 1
        leaves = (lambda: "s", lambda: self.gather("float"))
        if depth <= 0:
            return c.one_of(*leaves, lambda: c.pick("0.5", "1.0", "-2.0", "0.1"))
        pair = (lambda: f"({c.pick(*_SMOOTH_PAIRS).format(self._tensor(less), self._tensor(less))})",) * 2
        return c.one_of(
            leaves[0],
            *leaves,
            lambda: c.pick(*_SMOOTH).replace("{}", self._tensor(less)),
            *pair,
            lambda: f"torch.where({self.bool(less)}, {self.float(less)}, {self.float(less)})",
            lambda: f"(({self._int_tensor(1)}) * {c.pick('0.25', '0.1', '-0.5')})",
            lambda: f"({self.exact(2)} * s)" if c.chance(30) else self.exact(2),
        )

    def _tensor(self, depth: int) -> str:
        text = self.float(depth)
        return f"torch.tensor({text})" if text.replace(".", "").lstrip("-").isdigit() else text

    def score(self) -> str:
        """A whole score_mod: half of them what users write, half anything."""
        c = self.choices
        twice = (self.table, lambda: self.float(3))
        return c.one_of(
            lambda: self.gather("float"),
            *twice,
            *twice,
            lambda: "s + " + c.pick(*_DIVISIONS).format(f"({self.exact(1)})", f"({c.pick(self.exact(0), _INFINITE)})"),
            lambda: f"s + {self.gather('float')}",
            lambda: f"torch.where({self.bool(2)}, s, {c.pick(*EXTREMES)})",
            lambda: f"torch.where({c.pick('i', 'j', 'h', 'b')} {c.pick('>=', '==', '!=')} {c.below(3)}, s, {c.pick(*EXTREMES)})",
            lambda: self.capture(normal(()), True),
            lambda: f"torch.where({self.bool(1)}, {self.gather('float')}, {self.gather('float')})",
            lambda: f"s + {self.exact(3)}",
        )

    def table(self) -> str:
        """A dense float for each score, read as it lies in memory, or backwards, or all but."""
        c, (batch, heads, rows, cols) = self.choices, self.sizes.values()
        head, shape = c.pick(("", ()), ("", ()), ("h, ", (heads,)), ("b, h, ", (batch, heads)))
        name = self.capture(normal((*shape, rows, cols)), True)
        row = c.pick("i", "i", f"{rows - 1} - i", f"(i + 1) % {rows}")
        col = c.pick("j", "j", f"{cols - 1} - j", f"(j + 3) % {cols}")
        return c.pick("{}", "{}", "s + {}", "torch.tanh({})").format(f"{name}[{head}{row}, {col}]")

    def mask(self) -> str:
        """A whole mask_mod."""
        c = self.choices
        anything = (lambda: self.bool(3),) * 2
        return c.one_of(
            *anything,
            lambda: self.gather("bool"),
            lambda: self.capture(f"torch.tensor({c.pick(True, False)})", False),
        )
