# SPDX-License-Identifier: Apache-2.0
"""decoder_layers: the calls that it is made of to the last bit, float64 within their errors, what it writes and what it
refuses, torch's checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

import lowbit
from lowbit.ops.attention import attention
from lowbit.ops.decoder_layers import decoder_layers
from lowbit.ops.linear import activation_functions, linear
from lowbit.ops.rms_norm import rms_norm
from lowbit.ops.rope_append import rope_append

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


def arguments(layers: list[dict[str, Any]], x: Tensor, **more: Any) -> dict[str, Any]:
    batch, length, _ = x.shape
    angle = torch.linspace(0, 5, length * SIZE).view(1, length, SIZE)
    weights, numbers = [], []
    for one in layers:
        numbers.append(len(one["linears"]) - 4)
        for product in one["linears"]:
            weights += [product.weight] if product.bias is None else [product.weight, product.bias.detach()]
            numbers += [*product.op_args, product.row_number, product.bias is not None]
    call = {
        "x": x, "cos": angle.cos(), "sin": angle.sin(), "start": 0, "mask": None, "causal": False, "scale": 0.25,
        "score_mod": (), "eps": EPS, "offset": 0.5, "activation": 4, "heads_eps": EPS, "heads_offset": 0.0,
        "weights": weights, "linears": numbers,
        "keys": [one["keys"] for one in layers], "values": [one["values"] for one in layers],
        "norms": [norm for one in layers for norm in one["norms"]],
        "head_norms": [norm for one in layers for norm in one["head_norms"]],
    }  # fmt: skip
    return call | more


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
    got = decoder_layers(**arguments(layers, x, **more))
    wanted = one_by_one(others, arguments(others, x, **more))
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


@pytest.mark.parametrize("head_norms", [False, True])
def test_float64(head_norms: bool) -> None:
    layers = [layer(i, FORMATS["float"], torch.float32, 2, head_norms, head_norms, 2) for i in range(2)]
    call = arguments(layers, torch.randn(2, 7, HIDDEN), causal=True)
    torch.testing.assert_close(decoder_layers(**call).double(), wide(layers, call), rtol=2e-5, atol=2e-5)


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
    y = decoder_layers(**arguments(layers, x, start=5))
    assert torch.equal(y, one_by_one(others, arguments(others, x, start=5)))
    with pytest.raises(ValueError, match=r"x must have one row where q, k and v are products of their own, got \[1, 2, 48\]"):
        decoder_layers(**arguments(layers, torch.randn(1, 2, HIDDEN), start=5))


@pytest.mark.parametrize("batch, length", [(0, 3), (2, 0)])
def test_no_tokens(batch: int, length: int) -> None:
    layers = [layer(0, FORMATS["float"], torch.float32, 2, False, False, batch)]
    before = layers[0]["keys"].clone()
    assert decoder_layers(**arguments(layers, torch.randn(batch, length, HIDDEN))).shape == (batch, length, HIDDEN)
    assert torch.equal(layers[0]["keys"], before)


def changed_list(name: str, change: Any) -> Any:
    def change_one(call: dict[str, Any]) -> dict[str, Any]:
        return call | {name: change(list(call[name]))}

    return change_one


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda call: call | {"x": call["x"].double()}, TypeError, "decoder_layers: x must be float32, bfloat16 or float16"),
        (lambda call: call | {"x": call["x"][0]}, ValueError, r"decoder_layers: x must have shape \[B, L, k\], got \[3, 48\]"),
        (lambda call: call | {"keys": [], "values": []}, ValueError, "keys must be those of at least one layer, got none"),
        (lambda call: call | {"start": 1, "causal": True}, ValueError, "causal must be False behind tokens that are in the cache"),
        (lambda call: call | {"start": ROOM}, ValueError, "keys must have room for tokens 11 to 14, got 11"),
        (lambda call: call | {"activation": 9}, ValueError, "activation must be"),
        (lambda call: call | {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        (changed_list("norms", lambda norms: norms[:3]), ValueError, "norms must be two weights or four for each of 2 layers, got 3"),
        (changed_list("norms", lambda norms: [*norms, *norms, norms[0]]), ValueError, "norms must be two weights or four for each of 2 layers, got 9"),
        (changed_list("norms", lambda norms: norms[:2]), ValueError, "norms must be two weights or four for each layer, got 1"),
        (changed_list("values", lambda values: values[:1]), ValueError, "values must have more for this number of layers, got 1"),
        (changed_list("values", lambda values: [*values, *values]), ValueError, "values must be 2 for this number of layers, got 4"),
        (changed_list("values", lambda values: [values[0].half(), values[1]]), TypeError, "values must be float32, got float16"),
        (changed_list("weights", lambda weights: weights[:-1]), ValueError, "weights must have more for this number of layers, got 9"),
        (changed_list("weights", lambda weights: weights[::-1]), ValueError, "weight must have the packed shape"),
        (changed_list("linears", lambda numbers: numbers[:-1]), ValueError, "linears must have more for this number of layers, got 81"),
        (changed_list("linears", lambda numbers: [1, 100, *numbers[2:]]), ValueError, "weight must have the packed shape"),
        (changed_list("linears", lambda numbers: [2, *numbers[1:]]), ValueError, "linears must begin with 1 or 3 products of qkv, got 2"),
        (changed_list("head_norms", lambda _: [torch.ones(SIZE)]), ValueError, "head_norms must have more for this number of layers"),
        (lambda call: call | {"x": call["x"].requires_grad_()}, NotImplementedError, "no argument may require a gradient"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_and_nothing_is_written(change: Any, error: type[Exception], text: str) -> None:
    layers = [layer(i, FORMATS["float"], torch.float32, 2, False, False, 2) for i in range(2)]
    before = copied(layers)
    call = change(arguments(layers, torch.randn(2, 3, HIDDEN)))
    refused_alike(decoder_layers, call, error, text)
    for one, other in zip(layers, before, strict=True):
        assert torch.equal(one["keys"], other["keys"]) and torch.equal(one["values"], other["values"])


def test_a_tangent_is_refused_and_nothing_is_written(subtests: pytest.Subtests) -> None:
    layers = [layer(0, FORMATS["float"], torch.float32, 2, False, False, 2)]
    before, call = copied(layers), arguments(layers, torch.randn(2, 3, HIDDEN))
    for name in ("x", "cos"):
        with subtests.test(name), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="decoder_layers: no forward-mode derivative"):
            decoder_layers(**call | {name: forward_ad.make_dual(call[name], torch.ones_like(call[name]))})
    assert torch.equal(layers[0]["keys"], before[0]["keys"]) and torch.equal(layers[0]["values"], before[0]["values"])
    wanted = one_by_one(before, call)
    with forward_ad.dual_level():
        assert torch.equal(decoder_layers(**call), wanted)  # no tensor here has a tangent


def test_opcheck() -> None:
    layers = [layer(i, FORMATS["int8"], torch.float32, 2, True, True, 1) for i in range(2)]
    call = arguments(layers, torch.randn(1, 2, HIDDEN), start=3)
    names = [argument.name for argument in torch.ops.lowbit.decoder_layers_.default._schema.arguments]
    torch.library.opcheck(torch.ops.lowbit.decoder_layers_.default, tuple(call[name] for name in names))
