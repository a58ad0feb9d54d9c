# SPDX-License-Identifier: Apache-2.0
"""run_program with the steps of a mixture of experts: the calls that it is made of, a router's product on every kernel
row beside float64, compiled and saved programs, what it refuses."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor, nn

import lowbit
from lowbit import _C, testing
from lowbit.ops.experts import Gate, experts, gate_of
from lowbit.ops.program import Program
from lowbit.ops.run_program import KeptProgram, run_program

HIDDEN, INNER, EXPERTS, K = 64, 32, 9, 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
U = testing.ROUNDOFF["float32"]
FORMATS = {
    "float": lowbit.int8_weight_only(),
    "int8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
}
SOFTMAX = _C.SCORINGS["softmax"]
route_row = fixture_of(testing.rows("route"))
pointwise_row = fixture_of(testing.rows("pointwise"))


def packed(n: int, k: int, config: Any) -> tuple[Tensor, Any]:
    layers = []
    for _ in range(EXPERTS):
        layer = nn.Linear(k, n, bias=False)
        layers.append(lowbit.QuantLinear.from_linear(layer, config.spec(torch.float32)))
    return torch.stack([layer.weight.detach() for layer in layers]), layers[0].op_args


def mixture(config: str, gate: Gate, biases: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    gate_up, gate_up_args = packed(INNER * (2 if gate.gated else 1), HIDDEN, FORMATS[config])
    down, down_args = packed(HIDDEN, INNER, FORMATS[config])
    return {
        "gate_up": gate_up, "down": down, "gate_up_args": gate_up_args, "down_args": down_args, "gate": gate,
        "gate_up_bias": torch.randn(EXPERTS, gate_up_args[0]) if biases else None,
        "down_bias": torch.randn(EXPERTS, HIDDEN) if biases else None,
        "router": torch.randn(EXPERTS, HIDDEN) / 8, "router_bias": torch.randn(EXPERTS) if biases else None,
    }  # fmt: skip


def program_of(of: dict[str, Any], **options: Any) -> Program:
    program, x = Program(), Program.input(0)
    constant = program.constant
    router = {"weight": constant(of["router"]), "bias": constant(of["router_bias"])}
    weights, index = program.route(x, K, SOFTMAX, **router, normalize=True, **options)
    y = program.experts(
        x, constant(of["gate_up"]), constant(of["down"]), index, weights, of["gate_up_args"], of["down_args"],
        of["gate"], constant(of["gate_up_bias"]), constant(of["down_bias"]),
    )  # fmt: skip
    program.scaled_add(y, x, Program.input(1), 0.5)
    return program


def one_by_one(of: dict[str, Any], x: Tensor, gate: Tensor, rounds: bool = False) -> Tensor:
    rows = x.flatten(0, -2)
    logits = nn.functional.linear(rows.double(), of["router"].double(), None if of["router_bias"] is None else of["router_bias"].double())
    logits = logits.to(x.dtype).float() if rounds else logits.float()
    weights, index = lowbit.route(logits, K, normalize=True)
    y = experts(
        rows, of["gate_up"], of["down"], index, weights, of["gate_up_args"], of["down_args"], of["gate"],
        of["gate_up_bias"], of["down_bias"],
    ).view_as(x)  # fmt: skip
    return (x.double() + 0.5 * gate.double().sigmoid() * y.double()).to(x.dtype)


GATES = {"silu": gate_of(), "gpt-oss": gate_of(alpha=1.702, limit=7.0, up_offset=1.0), "no gate": gate_of("relu_squared", gated=False)}


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("config", FORMATS)
def test_the_calls_that_it_is_made_of(config: str, biases: bool, gate: str, dtype: torch.dtype) -> None:
    of = mixture(config, GATES[gate], biases)
    for shape in ((1, 1), (2, 7), (1, 70)):
        x, s = torch.randn(*shape, HIDDEN).to(dtype), torch.randn(*shape, 1).to(dtype)
        program = program_of(of)
        got = run_program(program.code, program.constants, [], [x, s], [])
        assert got.dtype == dtype and got.shape == x.shape
        wanted = one_by_one(of, x, s)
        torch.testing.assert_close(got, wanted, rtol=4 * torch.finfo(dtype).eps, atol=2e-6 + 4 * torch.finfo(dtype).eps)


def routed(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Weights and index of a program of one step."""
    program = Program()
    weights, _ = program.route(Program.input(0), k, SOFTMAX, program.constant(weight), program.constant(bias), **options)
    index = run_program(program.code, program.constants, [], [x], [])
    program.scaled_add(weights)
    return run_program(program.code, program.constants, [], [x], []), index


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_weight", DTYPES, ids=str)
def test_every_row_computes_a_routers_product_within_its_float32_roundings(
    route_row: str, of_weight: torch.dtype, dtype: torch.dtype
) -> None:
    """With k = E all logits come back, as the logarithms of weights. A sum has (H / 16 + 20) roundings of the sum of the
    absolute terms, a logarithm those of its argument, which is not small here."""
    torch.manual_seed(1)
    for tokens, hidden, count in ((1, 1, 1), (1, 64, 4), (5, 65, 7), (130, 48, 33), (3, 2048, 128)):
        x, weight = torch.randn(tokens, hidden).to(dtype), (torch.randn(count, hidden) / hidden**0.5).to(of_weight)
        bias = torch.randn(count).to(dtype) if count % 2 else None
        with forced(route_row):
            weights, index = routed(x, weight, bias, count)
            assert _C.last_kernel("route") == route_row
        wide = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        wanted = wide.log_softmax(-1).gather(-1, index)
        size = (x.double().abs() @ weight.double().abs().T).amax(-1, keepdim=True) + (0 if bias is None else bias.abs().max().double())
        got = weights.double().log()
        allowed = 2 * U * ((hidden / 16 + 20) * size + count / 16 + 24 + wide.abs().amax(-1, keepdim=True) * 2)
        testing.assert_within(got, wanted, allowed.expand_as(got), what="logits")
        assert torch.equal(index.sort(-1).values, torch.arange(count).expand(tokens, -1))


def test_a_row_of_the_product_does_not_depend_on_the_others_nor_on_threads(route_row: str) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(70, 96), torch.randn(21, 96)
    with forced(route_row):
        weights, index = routed(x, weight, None, 5)
        alone = [routed(row[None], weight, None, 5) for row in x]
    assert torch.equal(weights, torch.cat([one for one, _ in alone]))
    assert torch.equal(index, torch.cat([one for _, one in alone]))
    same_for_any_threads(lambda: routed(torch.randn(300, 512, generator=torch.Generator().manual_seed(3)), torch.ones(64, 512), None, 2)[0])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_logits_are_rounded_where_the_router_computes_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(40, 64).to(dtype), torch.randn(12, 64).to(dtype)
    logits = (x.double() @ weight.double().T).to(dtype).float()
    weights, index = routed(x, weight, None, 4, rounds=True)
    wanted, chosen = lowbit.route(logits, 4)
    assert torch.equal(index, chosen)
    torch.testing.assert_close(weights, wanted)


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_computes_scaled_add(pointwise_row: str, dtype: torch.dtype) -> None:
    """One rounding to the dtype, and in float32 those of a sigmoid (8), a product and a sum."""
    torch.manual_seed(4)
    for shape, scale in (((1, 1), 1.0), ((3, 17), -0.3), ((2, 5, 64), 2.0)):
        x, add = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        gate = (4 * torch.randn(*shape[:-1], 1)).to(dtype)
        for given in ((), (add,), (None, gate), (add, gate)):
            program, tensors = Program(), [x, *(tensor for tensor in given if tensor is not None)]
            numbers = iter(range(1, 3))
            operands = [-1 if tensor is None else Program.input(next(numbers)) for tensor in given]
            program.scaled_add(Program.input(0), *operands, scale=scale)
            with forced(pointwise_row):
                got = run_program(program.code, [], [], tensors, [])
            factor = scale * (gate.double().sigmoid() if len(given) > 1 else 1.0)
            term = add.double() if given and given[0] is not None else torch.zeros(shape, dtype=torch.float64)
            wanted = factor * x.double() + term
            size = (factor * x.double()).abs() + term.abs()
            roundoff = testing.ROUNDOFF[str(dtype).removeprefix("torch.")]
            testing.assert_within(got, wanted, 12 * U * size + 1.01 * roundoff * wanted.abs() + 1e-7, what="scaled_add")


def test_one_region_for_a_token() -> None:
    of = mixture("int8", gate_of(), False)
    program = program_of(of)
    kept, x = KeptProgram(program), torch.randn(1, 1, HIDDEN)
    gate = torch.zeros(1, 1, 1)
    kept([], [x, gate], [])
    before = _C.opened_regions()
    kept([], [x, gate], [])
    assert _C.opened_regions() - before <= 1


def test_kept_compiled_and_saved(tmp_path: pathlib.Path) -> None:
    of = mixture("int8", gate_of(), True)
    program = program_of(of)
    x, gate = torch.randn(1, 5, HIDDEN), torch.randn(1, 5, 1)
    wanted = run_program(program.code, program.constants, [], [x, gate], [])
    assert torch.equal(KeptProgram(program)([], [x, gate], []), wanted)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in program.constants])

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return torch.ops.lowbit.run_program_(program.code, list(self.held), [], [x, gate], []) * 1.0

    block = Block()
    with torch.no_grad():
        assert torch.equal(torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")(x, gate), wanted)
    tokens = torch.export.Dim("tokens", min=2, max=99)
    saved = torch.export.export(block, (x, gate), dynamic_shapes=({1: tokens}, {1: tokens}))
    torch.export.save(saved, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    assert torch.equal(loaded(x, gate), wanted)
    more, gates = torch.randn(1, 9, HIDDEN), torch.randn(1, 9, 1)
    assert torch.equal(loaded(more, gates), run_program(program.code, program.constants, [], [more, gates], []))


def refused(program: Program, inputs: list[Tensor], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        run_program(program.code, program.constants, [], inputs, [])


def test_what_it_refuses() -> None:
    of = mixture("int8", gate_of(), False)
    x, gate = torch.randn(1, 2, HIDDEN), torch.randn(1, 2, 1)
    refused(program_of(of | {"router": torch.randn(EXPERTS, HIDDEN + 1)}), [x, gate], ValueError, "step 0: route: weight must have shape")
    refused(program_of(of | {"router": of["router"].double()}), [x, gate], TypeError, "weight must be float32")
    refused(program_of(of | {"router_bias": torch.randn(EXPERTS + 1)}), [x, gate], ValueError, "bias must have shape")
    refused(program_of(of, groups=2), [x, gate], ValueError, "groups must divide")
    refused(program_of(of | {"down": of["down"][1:]}), [x, gate], ValueError, "step 1: experts: down must have shape")
    refused(program_of(of), [x, gate[:, :1]], ValueError, "step 2: scaled_add: gate must have one element for each row")
    program = Program()
    program.scaled_add(Program.input(0), scale=float("nan"))
    refused(program, [x], ValueError, "scale must be finite")
    program = Program()
    program.route(Program.input(0), EXPERTS + 1, SOFTMAX, program.constant(of["router"]))
    refused(program, [x], ValueError, "k must be 1 to 9")
    program.code[2] = 99  # fields
    refused(program, [x], ValueError, "must have its fields")
