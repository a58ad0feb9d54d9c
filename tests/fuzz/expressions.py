# SPDX-License-Identifier: Apache-2.0
"""Random score_mods and mask_mods as text.

Expressions have a type: int, bool, exact (a float that every dtype holds exactly, or inf) or float. What jumps (comparisons, floor,
remainder) takes ints and exact floats alone: of a rounded score it could be anything. Captured tensors are collected on the way,
with the text that makes each; the mod sees them as t0, t1, ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .choices import Choices
from .tensors import EXTREMES, INFINITY, booleans, halves, integers, layout, normal

_INT_PAIRS = (
    "{} + {}",
    "{} - {}",
    "torch.maximum({}, {})",
    "torch.minimum({}, {})",
    "{} * {}",
    "{} & {}",
    "{} | {}",
    "{} ^ {}",
)
_INT_BY = (
    "{} // {}",
    "{} % {}",
    "torch.div({}, {}, rounding_mode='trunc')",
    "torch.fmod({}, {})",
    "torch.remainder({}, {})",
)
_COMPARISONS = ("{} >= {}", "{} < {}", "{} <= {}", "{} > {}", "{} == {}", "{} != {}")
_SMOOTH = (
    "torch.tanh({})", "-{}", "{} * 0.5", "torch.sigmoid({})", "torch.sin({})", "torch.cos({})", "torch.erf({})", "torch.atan({})",
    "torch.exp(-({}) ** 2)", "torch.log1p(({}) ** 2)", "torch.sqrt(1 + ({}) ** 2)", "torch.nn.functional.silu({})",
    "torch.nn.functional.gelu({})", "({}).abs()", "torch.relu({})", "torch.clamp({}, -2.0, 2.0)", "torch.expm1(torch.tanh({}))",
    "torch.square({}) * 0.1", "torch.exp2(torch.tanh({}))", "({}).float()", "torch.rsqrt(1.5 + ({}) ** 2)", "torch.nn.functional.softplus({})",
    "torch.nn.functional.logsigmoid({})", "torch.nn.functional.leaky_relu({}, 0.1)", "torch.logaddexp({}, torch.zeros_like({}))",
)  # fmt: skip
_SMOOTH_PAIRS = (
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "torch.maximum({}, {})",
    "torch.minimum({}, {})",
    "{} / (1.5 + ({}) ** 2)",
)
_EXACT_PAIRS = (
    "torch.floor_divide({}, {})", "torch.remainder({}, {})", "torch.fmod({}, {})", "{} // {}", "{} % {}", "torch.maximum({}, {})",
    "torch.minimum({}, {})", "{} + {}", "{} - {}", "{} * {}", "{} / {}", "torch.div({}, {}, rounding_mode='floor')",
    "torch.div({}, {}, rounding_mode='trunc')", "torch.pow({}, {})",
)  # fmt: skip
_EXACT_ONE = (
    "torch.floor({})",
    "torch.ceil({})",
    "torch.round({})",
    "torch.trunc({})",
    "torch.sign({})",
    "({}).abs()",
    "-({})",
    "torch.square({})",
)


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
        c = self.choices
        kind = (
            c.pick("index", "index", "const", "pair", "by", "gather", "abs", "where", "shift", "clamp")
            if depth
            else c.pick("index", "const")
        )
        if kind == "const":
            return str(c.pick(0, 1, 2, -1, 3, 7, -5, 100))
        if kind == "pair":
            return f"({c.pick(*_INT_PAIRS).format(self._int_tensor(depth - 1), self.int(depth - 1))})"
        if kind == "by":
            return f"({c.pick(*_INT_BY).format(self._int_tensor(depth - 1), c.pick('2', '3', '1', '-2', '7', 'torch.tensor(-3)'))})"
        if kind == "gather":
            return self.gather("int")
        if kind == "abs":
            return f"({self._int_tensor(depth - 1)}).abs()"
        if kind == "where":
            return f"torch.where({self.bool(depth - 1)}, {self._int_tensor(depth - 1)}, {self._int_tensor(depth - 1)})"
        if kind == "shift":
            return f"(({self._int_tensor(depth - 1)}) >> {c.between(0, 3)})"
        if kind == "clamp":
            return f"({self._int_tensor(depth - 1)}).clamp({c.between(-4, 0)}, {c.between(1, 9)})"
        return c.pick("i", "j", "h", "b")

    def _int_tensor(self, depth: int) -> str:
        return self.choices.pick(
            "(i - j)", "i", "j", "h", f"({self.choices.pick('j', 'i')} + {self.int(depth) if depth else 1})"
        )

    def index(self, size: int) -> str:
        """An int within -size .. size - 1."""
        c = self.choices
        names = [name for name, extent in self.sizes.items() if extent == size]
        kind = c.pick(
            "name", "name", "name", "reversed", "remainder", "negative", "const", "clamp", "captured", "captured"
        )
        if kind in ("name", "reversed", "negative") and names:
            name = c.pick(*names)
            return {"name": name, "reversed": f"{size - 1} - {name}", "negative": f"-1 - {name}"}[kind]
        if kind == "const":
            return str(c.between(-size, size - 1))
        if kind == "clamp":
            return f"({self._int_tensor(1)}).clamp(0, {size - 1})"
        if kind == "captured":
            return self.capture(integers((), 0, size, c.pick("int64", "int32")), False)
        return f"({self._int_tensor(1)}) % {size}"

    def gather(self, type: str) -> str:
        """One element of a captured tensor, by one of the ways to index."""
        c = self.choices
        rank = c.pick(2, 1, 3, 4, 0, 2)
        order = list(self.sizes.items())
        start = c.pick(2, 0, 1, 3) if rank <= 2 else 0
        shape = [(order[(start + at) % 4][1] if c.chance(80) else c.pick(1, 2, 5, 16)) or 1 for at in range(rank)]
        dtype = c.pick("float32", "float32", "bfloat16", "float16", "float64") if type == "float" else "float32"

        def make(sizes: object) -> str:
            sizes = list(sizes)  # type: ignore[call-overload]
            if type == "int":
                return integers(sizes, -9, 10, c.pick("int64", "int32", "int16"))
            if type == "bool":
                return booleans(sizes)
            return halves(sizes) if type == "exact" else normal(sizes, dtype)

        name = self.capture(layout(c, make, shape), type in ("float", "exact"))
        return self.read(name, shape, type)

    def read(self, name: str, shape: list[int], type: str) -> str:
        c, rank = self.choices, len(shape)
        indices = [self.index(size) for size in shape]
        if rank == 0:
            return c.pick(name, f"{name}[()]", f"{name}.reshape(())", f"{name} * 1" if type != "bool" else name)
        kind = c.pick(
            "together", "together", "one by one", "transposed", "reshaped", "flat", "ellipsis", "row", "unsqueezed"
        )
        joined = ", ".join(indices)
        if kind == "one by one":
            return name + "".join(f"[{index}]" for index in indices)
        if kind == "transposed" and rank == 2:
            return f"{name}.t()[{indices[1]}, {indices[0]}]"
        if kind == "reshaped" and rank >= 2:
            place = f"({indices[0]}) % {shape[0]} * {shape[1]} + ({indices[1]}) % {shape[1]}"
            return f"{name}.reshape(-1, {', '.join(map(str, shape[2:])) or 1})[{place}{', ' + ', '.join(indices[2:]) if rank > 2 else ', 0'}]"
        if kind == "flat":
            place = " + ".join(
                f"(({index}) % {size}) * {math.prod(shape[at + 1 :])}"
                for at, (index, size) in enumerate(zip(indices, shape, strict=True))
            )
            return f"{c.pick(f'{name}.flatten()', f'{name}.reshape(-1)', f'{name}.contiguous().view(-1)')}[{place}]"
        if kind == "ellipsis":
            return f"{name}[..., {joined}]"
        if kind == "row" and rank >= 2 and shape[-1] <= 16 and type == "float":
            head = ", ".join(indices[:-1])
            return c.pick(
                f"{name}[{head}].sum()",
                f"{name}[{head}].mean()",
                f"{name}[{head}].amax()",
                f"torch.dot({name}[{head}], {name}[{head}])",
            )
        if kind == "unsqueezed":
            return f"{name}[None][0, {joined}]"
        return f"{name}[{joined}]"

    # -- bools

    def bool(self, depth: int) -> str:
        c = self.choices
        kind = (
            c.pick("compare", "compare", "causal", "gather", "and", "or", "not", "exact")
            if depth
            else c.pick("causal", "compare")
        )
        if kind == "compare":
            return f"({c.pick(*_COMPARISONS).format(self._int_tensor(max(depth - 1, 0)), self.int(max(depth - 1, 0)))})"
        if kind == "gather":
            return self.gather("bool")
        if kind in ("and", "or"):
            return f"({self.bool(depth - 1)} {'&' if kind == 'and' else '|'} {self.bool(depth - 1)})"
        if kind == "not":
            return f"(~{self.bool(depth - 1)})"
        if kind == "exact":
            return f"({c.pick(*_COMPARISONS).format(self.gather('exact'), self.exact(depth - 1))})"
        return "(j <= i)"

    # -- floats

    def exact(self, depth: int) -> str:
        c = self.choices
        kind = (
            c.pick("gather", "int", "const", "pair", "one", "where", "extreme")
            if depth > 0
            else c.pick("gather", "const", "extreme")
        )
        if kind == "int":
            return f"({self._int_tensor(1)}).to(torch.float32)"
        if kind == "const":
            return f"torch.tensor({c.pick('2.0', '0.0', '-1.5', '1.0', '-0.5', '-3.0')})"
        if kind == "extreme":
            return f"torch.tensor({c.pick(*(value for value in EXTREMES if 'inf' in value or value in ('0.0', '-0.0')), *EXTREMES[:5])})"
        if kind == "pair":
            return c.pick(*_EXACT_PAIRS).format(f"({self.exact(depth - 1)})", f"({self.exact(depth - 1)})")
        if kind == "one":
            return c.pick(*_EXACT_ONE).format(self.exact(depth - 1))
        if kind == "where":
            return f"torch.where({self.bool(1)}, {self.exact(depth - 1)}, {self.exact(depth - 1)})"
        return self.gather("exact")

    def float(self, depth: int) -> str:
        c = self.choices
        kind = (
            c.pick("score", "score", "gather", "smooth", "pair", "pair", "where", "int", "exact")
            if depth > 0
            else c.pick("score", "gather", "const")
        )
        if kind == "gather":
            return self.gather("float")
        if kind == "const":
            return c.pick("0.5", "1.0", "-2.0", "0.1")
        if kind == "smooth":
            inner = self.float(depth - 1)
            return c.pick(*_SMOOTH).replace("{}", self._tensor(inner))
        if kind == "pair":
            return f"({c.pick(*_SMOOTH_PAIRS).format(self._tensor(self.float(depth - 1)), self._tensor(self.float(depth - 1)))})"
        if kind == "where":
            return f"torch.where({self.bool(depth - 1)}, {self.float(depth - 1)}, {self.float(depth - 1)})"
        if kind == "int":
            return f"(({self._int_tensor(1)}) * {c.pick('0.25', '0.1', '-0.5')})"
        if kind == "exact":
            return f"({self.exact(2)} * s)" if c.chance(30) else self.exact(2)
        return "s"

    @staticmethod
    def _tensor(text: str) -> str:
        return f"torch.tensor({text})" if text.replace(".", "").lstrip("-").isdigit() else text

    def score(self) -> str:
        """A whole score_mod: half of them what users write, half anything."""
        c = self.choices
        kind = c.pick(
            "gather",
            "table",
            "table",
            "division",
            "bias",
            "anything",
            "hidden",
            "extreme row",
            "captured",
            "two gathers",
            "anything",
            "exact",
        )
        if kind == "gather":
            return self.gather("float")
        if kind == "table":
            return self.table()
        if kind == "division":
            operands = f"({self.exact(1)})", f"({c.pick(self.exact(0), f'torch.tensor({INFINITY})')})"
            return f"s + {c.pick(*_EXACT_PAIRS[:5]).format(*operands)}"
        if kind == "bias":
            return f"s + {self.gather('float')}"
        if kind == "hidden":
            return f"torch.where({self.bool(2)}, s, {c.pick(*EXTREMES)})"
        if kind == "extreme row":
            return f"torch.where({c.pick('i', 'j', 'h', 'b')} {c.pick('>=', '==', '!=')} {c.below(3)}, s, {c.pick(*EXTREMES)})"
        if kind == "captured":
            return self.capture(normal(()), True)
        if kind == "two gathers":
            return f"torch.where({self.bool(1)}, {self.gather('float')}, {self.gather('float')})"
        if kind == "exact":
            return f"s + {self.exact(3)}"
        return self.float(3)

    def table(self) -> str:
        """A dense float for each score, read as it lies in memory, or backwards, or all but."""
        c, (batch, heads, rows, cols) = self.choices, self.sizes.values()
        head, shape = c.pick(("", ()), ("", ()), ("h, ", (heads,)), ("b, h, ", (batch, heads)))
        name = self.capture(normal((*shape, rows, cols)), True)
        row, col = (
            c.pick("i", "i", f"{rows - 1} - i", "(i + 1) % " + str(rows)),
            c.pick("j", "j", f"{cols - 1} - j", "(j + 3) % " + str(cols)),
        )
        return c.pick("{}", "{}", "s + {}", "torch.tanh({})").format(f"{name}[{head}{row}, {col}]")

    def mask(self) -> str:
        """A whole mask_mod."""
        kind = self.choices.pick("anything", "gather", "captured", "anything")
        if kind == "gather":
            return self.gather("bool")
        if kind == "captured":
            return self.capture("torch.tensor(True)" if self.choices.chance(50) else "torch.tensor(False)", False)
        return self.bool(3)
