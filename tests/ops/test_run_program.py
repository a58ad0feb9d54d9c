# SPDX-License-Identifier: Apache-2.0
"""run_program: the calls that it is made of to the last bit, float64 within their errors, what it writes and what it
refuses, programs that are kept, compiled and saved, torch's checks."""

from __future__ import annotations

import concurrent.futures
import copy
import pathlib
from typing import Any

import pytest
import torch
from refusals import refused_alike
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

import lowbit
from lowbit.ops.attention import attention
from lowbit.ops.linear import activation_functions, linear
from lowbit.ops.program import Program
from lowbit.ops.rms_norm import rms_norm
from lowbit.ops.rope_append import rope_append
from lowbit.ops.run_program import KeptProgram, run_program
from lowbit.score.program import ProgramBuilder

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 48, 4, 2, 16, 80
ROOM = 11  # tokens of the cache
FORMATS = {
    "float": lowbit.int8_weight_only(),
    "int8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
}


def layer(i: int, config: Any, dtype: torch.dtype, norms: int, biases: bool, head_norms: bool, batch: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(i)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shapes = [((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), (HIDDEN, HEADS * SIZE), (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    linears = []
    for n, k in shapes:
        module = torch.nn.Linear(k, n, bias=biases)
        module.weight.data = random(n, k) / k**0.5
        if biases:
            module.bias.data = random(n)
        linears.append(lowbit.QuantLinear.from_linear(module, config.spec(torch.float32)))
    return {
        "linears": linears,
        "norms": [1 + random(HIDDEN).to(dtype) / 4 for _ in range(norms)],
        "head_norms": [1 + random(SIZE).to(dtype) / 4 for _ in range(2 * head_norms)],
        "keys": random(batch, KV_HEADS, ROOM, SIZE).to(dtype),
        "values": random(batch, KV_HEADS, ROOM, SIZE).to(dtype),
    }


def softcap(cap: float) -> tuple[int, ...]:
    program = ProgramBuilder()
    capped = program.op("tanh", program.op("mul", program.op("score"), program.constant(1 / cap)))
    return tuple(program.finish(program.op("mul", capped, program.constant(cap))))


def facts(x: Tensor, **more: Any) -> dict[str, Any]:
    """The arguments that all layers share."""
    _, length, _ = x.shape
    angle = torch.linspace(0, 5, length * SIZE).view(1, length, SIZE)
    call = {
        "x": x, "cos": angle.cos(), "sin": angle.sin(), "start": 0, "mask": None, "causal": False, "scale": 0.25,
        "score_mod": (), "offset": 0.5, "activation": 4,
    }  # fmt: skip
    return call | more


def program_of(layers: list[dict[str, Any]], *calls: dict[str, Any]) -> Program:
    """The numbers of layer i are those of call i, or of the last one; each call is a kind of layer."""
    program, x = Program(), Program.input(0)

    def product(of: lowbit.QuantLinear, x: int, **more: int) -> int:
        bias = None if of.bias is None else of.bias.detach()
        return program.linear(x, program.constant(of.weight), of.op_args, program.constant(bias), row=of.row_number, **more)

    def norm(weight: Tensor, x: int, **add: int) -> int:
        return program.rms_norm(x, program.constant(weight), EPS, call["offset"], **add)

    for i, one in enumerate(layers):
        kind = min(i, len(calls) - 1)
        call = calls[kind]
        cos, sin, mask = (Program.input(1 + 3 * kind + j) for j in range(3))
        *projections, o, gate, up, down = one["linears"]
        norms, four = one["norms"], len(one["norms"]) == 4
        keys, values = Program.state(2 * i), Program.state(2 * i + 1)
        first = norm(norms[0], x)
        if len(projections) == 1:
            qkv = product(projections[0], first)
        else:
            qkv, at = program.columns(first, sum(of.out_features for of in projections)), 0
            for of in projections:
                product(of, first, into=qkv, first_column=at)
                at += of.out_features
        of_heads = [program.constant(norm) for norm in one["head_norms"]]
        query = program.rope_append(qkv, cos, sin, keys, values, kind, *of_heads, *([EPS, 0.0] if of_heads else []))
        out = program.attention(query, keys, values, kind, call["scale"], mask, causal=call["causal"], score_mod=call["score_mod"])
        h = norm(norms[1], product(o, out), add=x) if four else product(o, out, add=x)
        second = norm(norms[len(norms) // 2], h)
        gated = product(up, second, mul=product(gate, second, activation=call["activation"]))
        x = norm(norms[3], product(down, gated), add=h) if four else product(down, gated, add=h)
    return program


def arguments(layers: list[dict[str, Any]], *calls: dict[str, Any]) -> dict[str, Any]:
    program = program_of(layers, *calls)
    masks = [torch.empty(0) if call["mask"] is None else call["mask"] for call in calls]
    of_kinds = [tensor for call, mask in zip(calls, masks, strict=True) for tensor in (call["cos"], call["sin"], mask)]
    return {
        "program": program.code, "constants": program.constants,
        "states": [state for one in layers for state in (one["keys"], one["values"])],
        "inputs": [calls[0]["x"], *of_kinds], "starts": [call["start"] for call in calls],
    }  # fmt: skip


def one_by_one(layers: list[dict[str, Any]], call: dict[str, Any]) -> Tensor:
    """The same by a call of each op."""
    x, eps, offset, start = call["x"], EPS, call["offset"], call["start"]
    batch, length, _ = x.shape
    seen = start + length

    def product(i: int, x: Tensor, activation: int = 0, mul: Tensor | None = None, add: Tensor | None = None) -> Tensor:
        of = one["linears"][i + len(one["linears"]) - 5]
        return linear(x, of.weight, of.op_args, None if of.bias is None else of.bias.detach(), activation, mul, add)

    for one in layers:
        norms, four = one["norms"], len(one["norms"]) == 4
        first, projections = rms_norm(x, norms[0], eps, offset=offset), len(one["linears"]) - 4
        qkv = torch.cat([product(i + 1 - projections, first) for i in range(projections)], dim=-1)
        qkv = qkv.view(batch, length, -1, SIZE)
        of_heads = (*one["head_norms"], EPS, 0.0) if one["head_norms"] else ()
        query = rope_append(qkv, call["cos"], call["sin"], one["keys"], one["values"], start, *of_heads)
        out, *_ = attention(
            query, one["keys"][:, :, :seen], one["values"][:, :, :seen], scale=call["scale"], causal=call["causal"],
            mask=call["mask"], score_mod=call["score_mod"],
        )  # fmt: skip
        out = out.transpose(1, 2).reshape(batch, length, -1)
        h = rms_norm(product(1, out), norms[1], eps, offset=offset, add=x) if four else product(1, out, add=x)
        second = rms_norm(h, norms[len(norms) // 2], eps, offset=offset)
        gated = product(3, second, mul=product(2, second, call["activation"]))
        x = rms_norm(product(4, gated), norms[3], eps, offset=offset, add=h) if four else product(4, gated, add=h)
    return x


def copied(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one | {"keys": one["keys"].clone(), "values": one["values"].clone()} for one in layers]


MASK = torch.rand(2, 1, 3, 7, generator=torch.Generator().manual_seed(5)) > 0.3
CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {  # batch, tokens, more arguments
    "a prompt": (2, 5, {"causal": True}),
    "one token": (1, 1, {"start": 6}),
    "tokens with a mask": (2, 3, {"start": 4, "mask": MASK}),
    "a full cache": (1, 2, {"start": ROOM - 2, "mask": torch.zeros(1, HEADS, 2, ROOM)}),
    "another activation": (1, 1, {"start": 2, "activation": 3, "offset": 1.0}),
}


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norms, biases, head_norms", [(2, False, False), (4, False, True), (2, True, True)])
@pytest.mark.parametrize("config", FORMATS)
def test_the_calls_that_it_is_made_of(
    config: str, norms: int, biases: bool, head_norms: bool, call: str, dtype: torch.dtype
) -> None:
    batch, length, more = CALLS[call]
    if more.get("mask") is not None and more["mask"].dtype != torch.bool:
        more = more | {"mask": more["mask"].to(dtype)}
    layers = [layer(i, FORMATS[config], dtype, norms, biases, head_norms, batch) for i in range(3)]
    others = copied(layers)
    x = torch.randn(batch, length, HIDDEN).to(dtype)
    got = run_program(**arguments(layers, facts(x, **more)))
    wanted = one_by_one(others, facts(x, **more))
    assert torch.equal(got, wanted) and got.dtype == dtype
    for one, other in zip(layers, others, strict=True):
        assert torch.equal(one["keys"], other["keys"]) and torch.equal(one["values"], other["values"])


def wide(layers: list[dict[str, Any]], call: dict[str, Any]) -> Tensor:
    """Layers of two norms in float64, from the weights as they are stored, without a cache."""
    x = call["x"].double()
    batch, length, _ = x.shape

    def norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (offset + weight.double())

    def heads(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.transpose(1, 2)
        x = x if weight is None else norm(x, weight, 0.0)
        low, high = x.chunk(2, dim=-1)
        return x * call["cos"].double() + torch.cat([-high, low], dim=-1) * call["sin"].double()

    for one in layers:
        weights = [product.to_linear().weight.double() for product in one["linears"]]
        biases = [None if product.bias is None else product.bias.double() for product in one["linears"]]
        products = [lambda x, w=w, b=b: functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        qkv = products[0](norm(x, one["norms"][0], call["offset"])).view(batch, length, -1, SIZE)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        q_weight, k_weight = one["head_norms"] or (None, None)
        out = functional.scaled_dot_product_attention(
            heads(q, q_weight), heads(k, k_weight), v.transpose(1, 2), is_causal=True, scale=call["scale"], enable_gqa=True
        )
        h = x + products[1](out.transpose(1, 2).reshape(batch, length, -1))
        second = norm(h, one["norms"][1], call["offset"])
        x = h + products[4](activation_functions[call["activation"]](products[2](second)) * products[3](second))
    return x


def test_layers_of_two_kinds() -> None:
    """Each with a mask, rotary embedding, number of tokens in its cache, activation, offset and score_mod of its own."""
    layers = [layer(i, FORMATS["int8"], torch.float32, 4, False, True, 2) for i in range(2)]
    others, x = copied(layers), torch.randn(2, 3, HIDDEN)
    one = facts(x, start=4, mask=MASK, score_mod=softcap(5.0))
    angle = torch.linspace(1, 2, 3 * SIZE).view(1, 3, SIZE)
    two = facts(x, start=2, mask=MASK[..., :5], activation=3, offset=1.0, cos=angle.cos(), sin=angle.sin(), scale=0.5)
    wanted = one_by_one(others[1:], two | {"x": one_by_one(others[:1], one)})
    assert torch.equal(run_program(**arguments(layers, one, two)), wanted)
    for layer_, other in zip(layers, others, strict=True):
        assert torch.equal(layer_["keys"], other["keys"]) and torch.equal(layer_["values"], other["values"])


@pytest.mark.parametrize("head_norms", [False, True])
def test_float64(head_norms: bool) -> None:
    layers = [layer(i, FORMATS["float"], torch.float32, 2, head_norms, head_norms, 2) for i in range(2)]
    call = facts(torch.randn(2, 7, HIDDEN), causal=True)
    torch.testing.assert_close(run_program(**arguments(layers, call)).double(), wide(layers, call), rtol=2e-5, atol=2e-5)


def apart(one: dict[str, Any]) -> dict[str, Any]:
    """The layer with q, k and v as layers of their own: q of another format, v of groups."""
    first, *others = one["linears"]
    parts = first.to_linear().weight.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE])
    configs = (lowbit.int4_weight_only(group_size=32), lowbit.int8_weight_only(), lowbit.int8_weight_only(group_size=32))
    linears = []
    for part, config in zip(parts, configs, strict=True):
        module = torch.nn.Linear(HIDDEN, len(part), bias=False)
        module.weight.data = part.data
        linears.append(lowbit.QuantLinear.from_linear(module, config.spec(torch.float32)))
    return one | {"linears": [*linears, *others]}


def test_projections_of_different_formats() -> None:
    """One row, and layers of both kinds; more rows would have to lie behind one another."""
    layers = [layer(i, FORMATS["float"], torch.float32, 2, False, False, 1) for i in range(3)]
    layers[1] = apart(layers[1])
    others = copied(layers)
    x = torch.randn(1, 1, HIDDEN)
    y = run_program(**arguments(layers, facts(x, start=5)))
    assert torch.equal(y, one_by_one(others, facts(x, start=5)))
    with pytest.raises(ValueError, match=r"step 2: x must have one row where a product writes a part of a row, got \[1, 2, 48\]"):
        run_program(**arguments(layers[1:], facts(torch.randn(1, 2, HIDDEN), start=5)))


@pytest.mark.parametrize("batch, length", [(0, 3), (2, 0)])
def test_no_tokens(batch: int, length: int) -> None:
    layers = [layer(0, FORMATS["float"], torch.float32, 2, False, False, batch)]
    before = layers[0]["keys"].clone()
    assert run_program(**arguments(layers, facts(torch.randn(batch, length, HIDDEN)))).shape == (batch, length, HIDDEN)
    assert torch.equal(layers[0]["keys"], before)


def changed_list(name: str, change: Any) -> Any:
    def change_one(call: dict[str, Any]) -> dict[str, Any]:
        return call | {name: change(list(call[name]))}

    return change_one


def with_number(at: int, number: int) -> Any:
    """An integer of the program is another."""
    return changed_list("program", lambda code: [*code[:at], number, *code[at + 1 :]])


# The program begins with [1], rms_norm [2..8], linear [9..25], rope_append [26..37], attention [38..48].
NORM, LINEAR, ROPE, ATTENTION = 1, 8, 25, 40
BAD_CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "no program": (changed_list("program", lambda _: []), ValueError, "program must begin with its version, 1, got nothing"),
    "another version": (with_number(0, 2), ValueError, "program must begin with its version, 1, got 2"),
    "no steps": (changed_list("program", lambda code: code[:1]), ValueError, "program must have at least one step with a result"),
    "half a step": (changed_list("program", lambda code: code[:2]), ValueError, "program must have a kind and a number of fields for step 0, got 1"),
    "a step without its fields": (changed_list("program", lambda code: code[:-1]), ValueError, "of program must have its fields, got 14 numbers for 15"),
    "a negative number of fields": (with_number(NORM + 1, -1), ValueError, "step 0 of program must have its fields"),
    "fields that are missing": (changed_list("program", lambda code: [1, 3, 2, *code[3:5]]), ValueError, "step 0 of program must have more fields"),
    "fields of a newer version": (changed_list("program", lambda code: [1, 3, 6, *code[3:8], 0]), ValueError, "step 0 of program must have 5 fields at the most, got 6"),
    "an unknown step": (with_number(NORM, 99), ValueError, "the kind of step 0 of program must be known, got 99"),
    "a step 0": (with_number(NORM, 0), ValueError, "the kind of step 0 of program must be known, got 0"),
    "no x": (with_number(NORM + 2, -1), ValueError, "x of step 0 of program must be given"),
    "no operand": (with_number(NORM + 2, -7), ValueError, "x of step 0 of program must be an operand, got -7"),
    "a huge operand": (with_number(NORM + 2, 2**62), ValueError, "x of step 0 of program must be an operand"),
    "a result of a later step": (with_number(NORM + 2, 4 * 5 + 3), ValueError, "x of step 0 of program must be a result of a step before, got result 5 of 0"),
    "its own result": (with_number(NORM + 2, 3), ValueError, "must be a result of a step before, got result 0 of 0"),
    "a state for a weight": (with_number(NORM + 3, 1), ValueError, "weight of step 0 of program must be a constant"),
    "a constant for keys": (with_number(ROPE + 5, 0), ValueError, "keys of step 2 of program must be a state"),
    "a negative start": (with_number(ROPE + 7, -1), ValueError, "start of step 2 of program must be at least 0, got -1"),
    "a score that is not there": (with_number(ATTENTION + 9, 0), ValueError, "score of step 3 of program must be that of a step before, got 0"),
    "a score program that is none": (changed_list("program", lambda code: [1, 1, 2, 5, 5, *code[1:]]), ValueError, "score program: version must be 1, got 5"),
    "a format that is not there": (with_number(LINEAR + 6, 1000), ValueError, "format must be"),
    "a negative n": (with_number(LINEAR + 4, -5), ValueError, "n and k must be at least 1"),
    "more constants": (changed_list("constants", lambda all: [*all, all[0]]), ValueError, "constants must be the 14 that program names, got 15"),
    "fewer constants": (changed_list("constants", lambda all: all[:-1]), ValueError, "constants must be the 14 that program names, got 13"),
    "fewer states": (changed_list("states", lambda all: all[:-1]), ValueError, "states must be the 4 that program names, got 3"),
    "fewer inputs": (changed_list("inputs", lambda all: all[:-1]), ValueError, "inputs must be the 4 that program names, got 3"),
    "no starts": (changed_list("starts", lambda _: []), ValueError, "starts must be the 1 that program names, got 0"),
    "a start before the first token": (changed_list("starts", lambda _: [-1]), ValueError, "starts must be numbers of tokens, got -1"),
    "a huge start": (changed_list("starts", lambda _: [2**63 - 1]), ValueError, "starts must be numbers of tokens"),
    "a full cache": (changed_list("starts", lambda _: [ROOM]), ValueError, "step 2: rope_append: keys must have room for tokens 11 to 14, got 11"),
    "float64": (changed_list("inputs", lambda all: [all[0].double(), *all[1:]]), TypeError, "x must be float32, bfloat16 or float16"),
    "x of two dimensions": (changed_list("inputs", lambda all: [all[0][0], *all[1:]]), ValueError, r"step 2: qkv must have shape \[B, L, "),
    "another dtype of values": (changed_list("states", lambda all: [all[0], all[1].half(), *all[2:]]), TypeError, "values must be float32, got float16"),
    "weights in another order": (changed_list("constants", lambda all: all[::-1]), (ValueError, TypeError), "step 0: rms_norm: weight must"),
    "no scale": (with_number(ATTENTION + 6, 0x7FF8 << 48), ValueError, "step 3: .*scale must be finite, got nan"),
    "another activation": (with_number(LINEAR + 11, 90), ValueError, "activation must be"),
    "a kept program that is not there": (lambda call: call | {"program": [0, 2**40], "constants": []}, ValueError, "program must be kept in this process, got number"),
    "no number of a kept one": (lambda call: call | {"program": [0], "constants": []}, ValueError, "program must have the number of the one that is kept"),
}  # fmt: skip


@pytest.mark.parametrize("change, error, text", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_program_is_refused_and_nothing_is_written(change: Any, error: type[Exception], text: str) -> None:
    layers = [layer(i, FORMATS["float"], torch.float32, 2, False, False, 2) for i in range(2)]
    before = copied(layers)
    refused_alike(run_program, change(arguments(layers, facts(torch.randn(2, 3, HIDDEN)))), error, text)
    for one, other in zip(layers, before, strict=True):
        assert torch.equal(one["keys"], other["keys"]) and torch.equal(one["values"], other["values"])


def test_random_numbers_are_errors_or_programs() -> None:
    """Each integer of a program is replaced by others; what is not refused is a call with a result."""
    layers = [layer(0, FORMATS["float"], torch.float32, 4, True, True, 1)]
    call = arguments(layers, facts(torch.randn(1, 1, HIDDEN), start=3))
    random = torch.Generator().manual_seed(0)
    refused = 0
    for at in range(len(call["program"])):
        near = torch.randint(-3, 70, (4,), generator=random).tolist()
        for number in (*near, 2**62, -(2**63)):
            try:
                run_program(**with_number(at, number)(call))
            except (ValueError, TypeError, RuntimeError):
                refused += 1
    assert refused > 3 * len(call["program"])


def test_more_than_one_token_behind_others_needs_a_mask() -> None:
    layers = [layer(0, FORMATS["float"], torch.float32, 2, False, False, 2)]
    call = arguments(layers, facts(torch.randn(2, 3, HIDDEN), start=1, causal=True))
    refused_alike(run_program, call, ValueError, "step 3: a mask must be given for more than one token behind others")


def test_a_gradient_is_refused() -> None:
    layers = [layer(0, FORMATS["float"], torch.float32, 2, False, False, 2)]
    call = arguments(layers, facts(torch.randn(2, 3, HIDDEN)))
    call["inputs"][0].requires_grad_()
    refused_alike(run_program, call, NotImplementedError, "run_program: no argument may require a gradient")


def test_a_tangent_is_refused_and_nothing_is_written(subtests: pytest.Subtests) -> None:
    layers = [layer(0, FORMATS["float"], torch.float32, 2, False, False, 2)]
    before, call = copied(layers), facts(torch.randn(2, 3, HIDDEN))
    for name in ("x", "cos"):
        with subtests.test(name), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="run_program: no forward-mode derivative"):
            run_program(**arguments(layers, call | {name: forward_ad.make_dual(call[name], torch.ones_like(call[name]))}))
    assert torch.equal(layers[0]["keys"], before[0]["keys"]) and torch.equal(layers[0]["values"], before[0]["values"])
    wanted = one_by_one(before, call)
    with forward_ad.dual_level():
        assert torch.equal(run_program(**arguments(layers, call)), wanted)  # no tensor here has a tangent


def test_a_kept_program_sees_what_changes() -> None:
    """Other shapes of x, other caches, and weights whose data is another: its plan is made anew where it has to be."""
    layers = [layer(i, FORMATS["int8"], torch.float32, 2, True, True, 1) for i in range(2)]
    others, random = copied(layers), torch.Generator().manual_seed(1)
    kept = KeptProgram(program_of(layers, facts(torch.randn(1, 1, HIDDEN), causal=True)))
    weight = layers[0]["linears"][1].weight

    def compare(length: int, start: int) -> None:
        call = facts(torch.randn(1, length, HIDDEN, generator=random), start=start, causal=length > 1)
        given = arguments(layers, call)
        assert torch.equal(kept(given["states"], given["inputs"], given["starts"]), one_by_one(others, call))

    for length, start in ((4, 0), (1, 4), (1, 5), (3, 0), (1, 3)):
        compare(length, start)
    weight.data = weight.data.roll(1, 0)
    compare(1, 4)
    for one, other in zip(layers, others, strict=True):
        for name in ("keys", "values"):
            one[name] = torch.cat([one[name], one[name]], dim=2)
            other[name] = one[name].clone()
    compare(1, 15)
    norm = layers[1]["norms"][0]
    norm.data = norm.data.double()
    with pytest.raises(TypeError, match="rms_norm: weight must be float32, bfloat16 or float16"):
        compare(1, 16)


def test_a_kept_program_is_freed_with_its_last_name_and_copied() -> None:
    layers = [layer(0, FORMATS["int8"], torch.float32, 2, False, False, 1)]
    call = facts(torch.randn(1, 1, HIDDEN), start=5)
    given = arguments(layers, call)
    kept = KeptProgram(program_of(layers, call))
    wanted = kept(given["states"], given["inputs"], given["starts"])
    other, number = copy.deepcopy(kept), kept._number
    assert torch.equal(other(given["states"], given["inputs"], given["starts"]), wanted)
    del kept
    refused_alike(run_program, given | {"program": [0, number], "constants": []}, ValueError, f"must be kept in this process, got number {number}")
    assert torch.equal(other(given["states"], given["inputs"], given["starts"]), wanted)


def test_threads_that_share_a_kept_program() -> None:
    layers = [layer(i, FORMATS["int8"], torch.float32, 2, True, True, 1) for i in range(3)]
    kept = KeptProgram(program_of(layers, facts(torch.randn(1, 1, HIDDEN), causal=True)))

    def results(length: int) -> list[Tensor]:
        own, random = copied(layers), torch.Generator().manual_seed(length)
        xs = [torch.randn(1, length, HIDDEN, generator=random) for _ in range(30)]
        calls = [arguments(own, facts(x, causal=True)) for x in xs]
        return [kept(call["states"], call["inputs"], call["starts"]) for call in calls]

    wanted = [results(length) for length in range(1, 5)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got, right in zip(pool.map(results, range(1, 5)), wanted, strict=True):
            assert all(map(torch.equal, got, right))


class Layers(torch.nn.Module):
    """Two layers of the program, as a model that is compiled or exported calls them: caches are arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [layer(i, FORMATS["int8"], torch.float32, 2, True, True, 1) for i in range(2)]
        call = facts(torch.randn(1, 1, HIDDEN), causal=True)
        self.program = program_of(self.layers, call)
        for i, constant in enumerate(self.program.constants):
            self.register_buffer(f"constant_{i}", constant.detach().clone())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, states: list[Tensor]) -> Tensor:
        constants = [getattr(self, f"constant_{i}") for i in range(len(self.program.constants))]
        return run_program(self.program.code, constants, states, [x, cos, sin, mask], [3])

    def example(self) -> tuple[Any, ...]:
        given = arguments(copied(self.layers), facts(torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(2)), start=3))
        return *given["inputs"], given["states"]


@torch.no_grad()
def test_a_compiled_program(subtests: pytest.Subtests) -> None:
    model = Layers()
    wanted = model(*model.example())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*model.example()), wanted)


@torch.no_grad()
def test_a_saved_program(tmp_path: pathlib.Path) -> None:
    model = Layers()
    wanted, example, again = model(*model.example()), model.example(), model.example()
    torch.export.save(torch.export.export(model, example), tmp_path / "program.pt2")
    got = torch.export.load(tmp_path / "program.pt2").module()(*again)
    assert torch.equal(got, wanted)
    for state, other in zip(again[-1], example[-1], strict=True):
        assert not torch.equal(state, other)  # written


def test_opcheck() -> None:
    layers = [layer(i, FORMATS["int8"], torch.float32, 2, True, True, 1) for i in range(2)]
    call = arguments(layers, facts(torch.randn(1, 2, HIDDEN), start=3))
    names = [argument.name for argument in torch.ops.lowbit.run_program_.default._schema.arguments]
    torch.library.opcheck(torch.ops.lowbit.run_program_.default, tuple(call[name] for name in names))
