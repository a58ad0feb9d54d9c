# SPDX-License-Identifier: Apache-2.0
"""Forward-mode derivatives: every public function with a differentiable input gives the tangent or refuses; none loses it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

import lowbit
from lowbit import _C
from lowbit.ops.attention import attention
from lowbit.ops.linear import linear
from lowbit.ops.rms_norm import rms_norm
from lowbit.ops.rope_append import rope_append
from lowbit.score.program import ProgramBuilder

CONFIGS = {
    "int8": lowbit.int8_weight_only(),
    "int4": lowbit.int4_weight_only(group_size=32),
    "w8a8": lowbit.int8_dynamic_activation_int8_weight(),
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
}


def by_dual(function: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Any:
    with forward_ad.dual_level():
        made = function(*map(forward_ad.make_dual, primals, tangents))
        return tuple(forward_ad.unpack_dual(made))


def by_compiled(function: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: torch.func.jvp(function, inputs[::2], inputs[1::2]), backend="aot_eager")
    return compiled(*(tensor for pair in zip(primals, tangents, strict=True) for tensor in pair))


WAYS = {"func": torch.func.jvp, "dual": by_dual, "compiled": by_compiled}


def quantized(config: Any = CONFIGS["w4a8"], features: tuple[int, int] = (64, 32), bias: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(*features, bias=bias))
    lowbit.quantize_(model, config)
    return model[0].requires_grad_(False)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_quantized_layer_has_the_tangent_that_its_backward_transposes(
    config: Any, dtype: torch.dtype, grad: bool, way: Callable[..., Any]
) -> None:
    layer = quantized(config)
    x, of_x = torch.randn(2, 5, 64, dtype=dtype), torch.randn(2, 5, 64, dtype=dtype)
    with torch.set_grad_enabled(grad):
        y, tangent = way(layer, (x,), (of_x,))
        assert torch.equal(y, layer(x)) and tangent.dtype == y.dtype
    wanted = of_x.float() @ layer.dequantize().T
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(tangent.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tangents_of_bias_mul_and_add_go_through_the_post_ops(way: Callable[..., Any]) -> None:
    layer = quantized()
    x, bias, mul, add = torch.randn(5, 64), torch.randn(32), torch.randn(5, 32), torch.randn(5, 32)
    silu = _C.ACTIVATIONS["silu"]

    def ours(x: Tensor, bias: Tensor, mul: Tensor, add: Tensor) -> Tensor:
        return linear(x, layer.weight, layer.op_args, bias, silu, mul, add)

    def theirs(x: Tensor, bias: Tensor, mul: Tensor, add: Tensor) -> Tensor:
        return functional.silu(x @ layer.dequantize().T + bias) * mul + add

    primals = x, bias, mul, add
    tangents = tuple(map(torch.randn_like, primals))
    torch.testing.assert_close(way(ours, primals, tangents)[1], torch.func.jvp(theirs, primals, tangents)[1], rtol=0.05, atol=0.05)
    only_bias = way(lambda bias: ours(x, bias, mul, add), (bias,), tangents[1:2])[1]
    torch.testing.assert_close(only_bias, torch.func.jvp(lambda bias: theirs(x, bias, mul, add), (bias,), tangents[1:2])[1], rtol=0.05, atol=0.05)


def test_jacobians_and_hessians_of_a_layer(subtests: pytest.Subtests) -> None:
    layer, x = quantized(), torch.randn(64)
    dense = layer.dequantize()
    for jacobian in (
        torch.autograd.functional.jacobian(layer, x, strategy="forward-mode", vectorize=True),
        torch.func.jacfwd(layer)(x), torch.func.jacrev(layer)(x), torch.func.vmap(torch.func.jacfwd(layer))(x[None])[0],
    ):  # fmt: skip
        torch.testing.assert_close(jacobian, dense)
    for outer, inner in ((torch.func.jacfwd, torch.func.jacrev), (torch.func.jacrev, torch.func.jacfwd), (torch.func.jacfwd, torch.func.jacfwd)):
        with subtests.test(outer=outer.__name__, inner=inner.__name__):
            hessian = outer(inner(lambda x: layer(x).square().sum()))(x)
            torch.testing.assert_close(hessian, 2 * dense.T @ dense, rtol=1e-4, atol=1e-4)


def test_a_fused_mlp_has_the_tangent_of_the_three_layers(gated_mlp: nn.ModuleDict) -> None:
    lowbit.quantize_(gated_mlp, lowbit.int8_weight_only())
    x, of_x = torch.randn(3, 64), torch.randn(3, 64)
    wanted = torch.func.jvp(gated_mlp["mlp"], (x,), (of_x,))[1]
    assert lowbit.fuse_gated_mlps(gated_mlp)
    assert wanted.abs().max() > 0
    torch.testing.assert_close(torch.func.jvp(gated_mlp["mlp"], (x,), (of_x,))[1], wanted)


def qkv(kv_heads: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, heads, length, 8, dtype=dtype) for heads, length in ((4, 5), (kv_heads, 7), (kv_heads, 7)))


def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False, score: Any = None) -> Tensor:
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    scores = scores if score is None else score(scores)
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf) if causal else scores
    return scores.softmax(-1) @ v


BIAS = torch.randn(4, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SEEN = lowbit.create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 7, BLOCK_SIZE=2)
ATTENTION: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "sdpa": (lowbit.scaled_dot_product_attention, reference),
    "causal": (lambda q, k, v: lowbit.scaled_dot_product_attention(q, k, v, is_causal=True), lambda q, k, v: reference(q, k, v, causal=True)),
    "masked": (lambda q, k, v: lowbit.scaled_dot_product_attention(q, k, v, BIAS), lambda q, k, v: reference(q, k, v, BIAS)),
    "flex": (lowbit.flex_attention, reference),
    "score_mod": (lambda q, k, v: lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s)), lambda q, k, v: reference(q, k, v, score=torch.tanh)),
    "captures": (lambda q, k, v: lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: s + BIAS[h, i, j]), lambda q, k, v: reference(q, k, v, BIAS)),
    "block mask": (lambda q, k, v: lowbit.flex_attention(q, k, v, None, SEEN), lambda q, k, v: reference(q, k, v, causal=True)),
    "unknown op": (lambda q, k, v: lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: torch.special.erfcx(s)), lambda q, k, v: reference(q, k, v, score=torch.special.erfcx)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*runs through torch")
@pytest.mark.parametrize("way", [torch.func.jvp, by_dual], ids=["func", "dual"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_has_its_tangent(name: str, way: Callable[..., Any], subtests: pytest.Subtests) -> None:
    ours, theirs = ATTENTION[name]
    primals = qkv()
    for which in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        with subtests.test(which=which):
            tangents = tuple(torch.randn_like(x) if wanted else torch.zeros_like(x) for x, wanted in zip(primals, which, strict=True))
            for got, wanted in zip(way(ours, primals, tangents), torch.func.jvp(theirs, primals, tangents), strict=True):
                torch.testing.assert_close(got, wanted)


def test_tangents_of_mask_sink_and_captured_tensors_and_of_lse() -> None:
    q, k, v = qkv(kv_heads=2)
    sink, tangent = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def ours(bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, scale=1.0, mask=bias[None], sink=sink)[:2]

    def theirs(bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) + bias
        scores = torch.cat([scores, sink[:, None, None].expand(2, 4, 5, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1), scores.logsumexp(-1)

    made = [torch.func.jvp(function, (BIAS, sink), (torch.ones_like(BIAS).cumsum(-1), tangent)) for function in (ours, theirs)]
    torch.testing.assert_close(*made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flex = torch.func.jvp(lambda bias: lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j], enable_gqa=True), (BIAS,), (BIAS,))
    torch.testing.assert_close(flex, torch.func.jvp(lambda bias: reference(q, k, v, bias), (BIAS,), (BIAS,)))


def test_jacobians_and_hessians_of_attention(subtests: pytest.Subtests) -> None:
    q, k, v = (tensor[:1, :2, :3, :4] for tensor in qkv())

    def loss(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda q: function(q, k, v).square().sum()

    wanted = torch.func.jacrev(torch.func.jacrev(loss(reference)))(q)
    for outer, inner in ((torch.func.jacfwd, torch.func.jacrev), (torch.func.jacrev, torch.func.jacfwd), (torch.func.jacfwd, torch.func.jacfwd)):
        with subtests.test(outer=outer.__name__, inner=inner.__name__):
            torch.testing.assert_close(outer(inner(loss(lowbit.scaled_dot_product_attention)))(q), wanted)
    jacobian = torch.autograd.functional.jacobian
    vectorized = jacobian(lambda q: lowbit.scaled_dot_product_attention(q, k, v), q, strategy="forward-mode", vectorize=True)
    torch.testing.assert_close(vectorized, jacobian(lambda q: reference(q, k, v), q))


def test_a_row_that_sees_nothing_has_a_tangent_of_0() -> None:
    q, k, v = qkv()
    mask = torch.ones(5, 7, dtype=torch.bool).index_fill(0, torch.tensor([2]), False)
    out, tangent = torch.func.jvp(lambda q: lowbit.scaled_dot_product_attention(q, k, v, mask), (q,), (q,))
    assert not out[:, :, 2].any() and not tangent[:, :, 2].any() and tangent.isfinite().all() and tangent.any()
    no_keys = torch.func.jvp(lambda q: lowbit.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0]), (q,), (q,))
    assert all(not tensor.any() for tensor in no_keys)


def refusing() -> dict[str, Callable[[Tensor], Any]]:
    k = v = torch.randn(1, 2, 4, 8)
    cache = lowbit.QuantizedKVCache("int8")
    cache.append(0, k, v)
    program = ProgramBuilder()
    code = program.finish(program.op("mul", program.op("score"), program.constant(2.0)))
    angles, rows = torch.ones(2, 1, 2, 8), torch.zeros(2, 1, 1, 4, 8)
    return {
        "QuantizedKVCache": lambda x: cache.append(0, x, v), "QuantizedKVCache ": lambda x: cache.append(0, k, x),
        "QuantizedKVCache  ": lambda x: cache.attend(0, x),
        "attention with score_mod": lambda x: attention(x, k, v, scale=1.0, score_mod=code),
        "attention with score_mod, mask_mod or a block mask": lambda x: attention(k, x, v, scale=1.0, score_mod=code),
        "rms_norm": lambda x: rms_norm(x, torch.ones(8)), "rms_norm ": lambda x: rms_norm(k, torch.ones(8), add=x),
        "rope_append": lambda x: rope_append(x, *angles, *rows, 0),
        "rope_append ": lambda x: rope_append(k, angles[0], x[:, :, 0], *rows, 0),
    }  # fmt: skip


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", refusing())
def test_what_has_no_tangent_refuses_it_by_name(name: str, way: Callable[..., Any]) -> None:
    call, x = refusing()[name], torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=f"^{name.strip()}.*: no forward-mode derivative"):
        way(lambda x: (call(x), x)[1], (x,), (x,))
    with forward_ad.dual_level():
        call(x)  # no tensor here has a tangent
