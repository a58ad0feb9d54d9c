# SPDX-License-Identifier: Apache-2.0
"""Calls of experts, on the CPU and on emulated GPUs: formats, routes, steps between the products, what must come out."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from expert_layers import ExpertsLayer
from torch import Tensor

from lowbit import _C, reference, testing
from lowbit.ops.experts import ACTIVATIONS
from lowbit.testing import LinearCase

op = torch.ops.lowbit.experts
E, H, INNER, OUT = 5, 132, 100, 52
FORMATS = [of for of in testing.format_cases() if of[1] in (0, 16, 32, 64)] + [
    ("int8_semi_sparse", group_size, "symmetric", x_format)
    for group_size, x_format in itertools.product((0, 32), _C.FORMAT_FACTS["int8_semi_sparse"]["x_formats"])
]
ROUTES = {
    "one token": [[3, 0]],
    "few tokens, expert 0 without any, pairs of no expert": [[1, 4], [4, E], [3, 4], [E, E]],
    "one expert, named twice by each token": [[2, 2]] * 40,
    "many tokens": [[t % 3 + 1, 4 if t % 5 else 1] for t in range(70)],
}


class Form(NamedTuple):
    """The step between the two products."""

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    up_offset: float = 0.0

    @property
    def numbers(self) -> tuple[Any, ...]:
        return ACTIVATIONS.index(self.activation), *self[1:]

    def function(self, sums: Tensor) -> Tensor:
        """[..., n] of the first product to [..., I], by torch."""
        run = {"silu": lambda x: x * torch.sigmoid(self.alpha * x), "relu_squared": lambda x: x.relu().square()}
        activation = run.get(self.activation) or reference.linear.ACTIVATIONS[self.activation]
        if not self.gated:
            return activation(sums)
        gate, up = (sums[..., ::2], sums[..., 1::2]) if self.interleaved else sums.chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return activation(gate) * (up + self.up_offset)


FORMS = [
    Form(),
    Form("gelu"),
    Form("gelu_tanh", interleaved=True),
    Form("relu", limit=2.0),
    Form("relu_squared", gated=False),
    Form(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True),
    Form(limit=1.5),
    Form("gelu", gated=False),
    Form("none", gated=False),
    Form("none"),
]


class Case(NamedTuple):
    """The arguments of the op but index and x, and the decoded weights."""

    gate_up: Tensor
    down: Tensor
    args: tuple[list[int], list[int]]
    gate_up_bias: Tensor
    down_bias: Tensor
    decoded: list[list[Any]]

    def run(self, x: Tensor, index: Tensor, weights: Tensor, form: Form) -> Tensor:
        return op(x, self.gate_up, self.down, index, weights, *self.args, *form.numbers, self.gate_up_bias, self.down_bias)


Of = tuple[str, int, str, str]


@functools.cache
def case(of: Of, gated: bool) -> Case:
    format, group_size, mapping, x_format = of
    torch.manual_seed(len(str(of)))
    packed, args, biases, decoded = [], [], [], []
    for n, k in ((INNER * (1 + gated), H), (OUT, INNER)):
        each = [testing.pack_weight(torch.randn(n, k) / 8, format, group_size, mapping) for _ in range(E)]
        packed.append(torch.stack(each))
        args.append([int(a) for a in LinearCase(1, n, k, "float32", format, group_size, mapping, x_format).op_args])
        biases.append(torch.randn(E, n))
        decoded.append([testing.decode_weight(one, n, k, format, group_size, mapping) for one in each])
    return Case(packed[0], packed[1], (args[0], args[1]), biases[0], biases[1], decoded)


def reference_of(of: Of, form: Form, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64, and its budget."""
    mine = case(of, form.gated)
    layer = ExpertsLayer(mine.decoded[0], mine.decoded[1], (of[3], of[3]), form.function, form.interleaved, mine.gate_up_bias, mine.down_bias)
    return layer(x, index, weights)


@functools.cache
def routed(route: str, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    tokens = len(ROUTES[route])
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).to(getattr(torch, dtype))
    return x, torch.tensor(ROUTES[route]), torch.rand(tokens, 2, generator=generator) - 0.2


@functools.cache
def expected(of: Of, form: Form, route: str, dtype: str, weights: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Every kernel row meets the same reference."""
    x, index, router = routed(route, dtype)
    return reference_of(of, form, x, index, router.to(weights))
