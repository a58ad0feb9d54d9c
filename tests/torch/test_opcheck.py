# SPDX-License-Identifier: Apache-2.0
"""torch's own checks of our registrations: schema, fake kernel, autograd registration, tracing with dynamic shapes."""

from __future__ import annotations

import pytest
import torch

import lowbit
from lowbit import _C, create_block_mask, testing
from lowbit.score import program_cache
from lowbit.testing import LinearCase, cached_data

CASES = [
    LinearCase(3, 20, 70, "float32", "int8", 0, "symmetric", "float", "float32", "none"),
    LinearCase(3, 20, 70, "bfloat16", "int4", 32, "symmetric", "int8_group", "dtype of x", "gelu", True, True),
    LinearCase(1, 17, 128, "float16", "int8", 0, "symmetric", "int8_row", None, "silu", False, True),
    LinearCase(4, 16, 64, "float32", "int4", 128, "asymmetric", "int8_row_asymmetric", "float32", "relu"),
    LinearCase(5, 20, 64, "float32", "bfloat16", 0, "symmetric", "float", None, "gelu_tanh", True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_linear(case: LinearCase, requires_grad: bool) -> None:
    data = cached_data(case)
    arguments = (data.x.clone().requires_grad_(requires_grad), data.packed, *case.op_args, data.bias,
                 _C.ACTIVATIONS[case.activation], data.mul, data.add)  # fmt: skip
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not requires_grad:  # gradients are the business of the Function outside the op
        utilities.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.lowbit.linear.default, arguments, test_utils=utilities)


@pytest.mark.parametrize("format, group_size, mapping", [("int8", 0, "symmetric"), ("int4", 32, "asymmetric"), ("float16", 0, "symmetric")])
def test_opcheck_dequantize(format: str, group_size: int, mapping: str) -> None:
    packed = testing.pack_weight(torch.randn(20, 70), format, group_size, mapping)
    arguments = (packed, 20, 70, _C.FORMATS[format], group_size, mapping == "asymmetric")
    torch.library.opcheck(torch.ops.lowbit.dequantize.default, arguments)


def test_a_size_that_a_run_will_say_is_asked_for_nothing() -> None:
    """One graph for all sizes, of which tracing knows one (dynamic) or none (unbacked), also where two have to agree."""
    packed = testing.pack_weight(torch.randn(20, 70), "int8")
    numbers = (20, 70, _C.FORMATS["int8"], 0, False, 0)
    graphs = []
    compiled = torch.compile(
        lambda x, mul: torch.ops.lowbit.linear(x, packed, *numbers, None, 0, mul), fullgraph=True,
        backend=lambda graph, inputs: graphs.append(graph) or graph,
    )  # fmt: skip
    for mark in (torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked):
        torch._dynamo.reset()
        graphs.clear()
        for m in (3, 5, 17):
            x, mul = torch.randn(m, 70), torch.randn(m, 20)
            mark(x, 0), mark(mul, 0)
            assert torch.equal(compiled(x, mul), torch.ops.lowbit.linear(x, packed, *numbers, None, 0, mul))
        assert len(graphs) == 1
        with pytest.raises(ValueError, match=r"linear: mul must have the shape of the result \[3, 20\], got \[4, 20\]"):
            compiled(*(torch.randn(m, columns) for m, columns in ((3, 70), (4, 20))))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)  # monkeypatch would take the name away at its end
def test_a_size_that_a_run_will_say_is_compared_by_the_run() -> None:
    """Rows that a trace finds by their values: as many as another tensor has, or as a weight is wide."""
    packed, op_args = testing.pack_weight(torch.randn(20, 6), "int8"), (20, 6, _C.FORMATS["int8"], 0, False, 0)

    def attend(found: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        arguments = (k, k, 1.0, False, None, 0.0, None, [], [], [], [], [], [128, 128], None)
        return torch.ops.lowbit.attention_forward(q[found.nonzero()[:, 0]], *arguments)[0]

    def multiply(found: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ops.lowbit.linear(found.nonzero()[:, 0].to(torch.float32), packed, *op_args)

    arguments = torch.ones(6), torch.randn(6, 4, 5, 8), torch.randn(6, 2, 7, 8)
    for function in (attend, multiply):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*arguments), function(*arguments))
        with pytest.raises((ValueError, RuntimeError), match=r"key must have shape \[5,|must be k=6 .* got x of shape \[5\]"):
            compiled(torch.tensor([1.0, 1, 0, 1, 1, 1]), *arguments[1:])


def test_ops_registered_once_and_registering_again_does_nothing() -> None:
    from lowbit.ops.registration import register, registered

    before = registered()
    register()
    assert registered() == before
    assert [row["op"] for row in before] == [row["op"] for row in _C.register_torch()]
    assert len({row["op"] for row in before}) == len(before)
    assert all(row["how"] for row in before)


def test_fakes_name_only_what_their_schema_has(subtests: pytest.Subtests) -> None:
    import inspect

    from lowbit.ops.fakes import fake_of

    for row in _C.register_torch():
        with subtests.test(row["op"]):
            name = row["op"].removeprefix("lowbit::")
            fake = fake_of(name)
            has = {argument.name for argument in getattr(torch.ops.lowbit, name).default._schema.arguments}
            kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
            reads = {parameter.name for parameter in inspect.signature(fake).parameters.values() if parameter.kind not in kinds}
            assert reads <= has, f"{name}: {reads - has}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_attention_with_everything(dtype: torch.dtype) -> None:
    """Mods with captured tensors, a block mask, a broadcast mask, dropout, a sink; layouts that are not dense."""
    score = program_cache.bind("test", lambda s, b, h, i, j, bias=torch.randn(4, 1): s + bias[h, 0] * (i - j), mask=False)
    visible = program_cache.bind("test", lambda b, h, i, j: i >= j, mask=True)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, BLOCK_SIZE=16)
    blocks = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    q, k, v = (torch.randn(2, heads, 16, 40).mT.to(dtype) for heads in (4, 2, 2))
    head = 0.3, False, torch.randn(1, 4, 1, 40), 0.25, torch.tensor(7), score.code, score.captured
    tail = visible.code, visible.captured, blocks, [16, 16], torch.randn(4)
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(torch.ops.lowbit.attention_forward.default, (q, k, v, *head, *tail, True), test_utils=utilities)
    out, lse, _ = torch.ops.lowbit.attention_forward(q, k, v, *head, *tail, True)
    grads = torch.randn(2, 4, 16, 40).mT.to(dtype), torch.randn(2, 40, 4).mT
    arguments = (q, k, v, out, lse, *grads, *head, [True], *tail, True, True)
    torch.library.opcheck(torch.ops.lowbit.attention_backward.default, arguments, test_utils=utilities)
    torch.library.opcheck(torch.ops.lowbit.attention_forward.default, (q, k, v, *head, *tail, True, True), test_utils=utilities)
    real, _, _ = torch.ops.lowbit.attention_forward(q, k, v, *head, *tail, True, True)
    assert real.dtype == torch.float32 and real.stride() == out.stride() and torch.equal(real.to(dtype), out)
    arguments = (q, k, v, real, lse, *(grad.float() for grad in grads), *head, [True], *tail, True, True)
    torch.library.opcheck(torch.ops.lowbit.attention_backward.default, arguments, test_utils=utilities)


@pytest.mark.parametrize("format", ["float32", "int8", "int4"])
def test_opcheck_decode(format: str) -> None:
    cache = lowbit.QuantizedKVCache("int8" if format == "float32" else format).layer(0)
    k, v = torch.randn(2, 2, 20, 40), torch.randn(2, 2, 20, 24)
    cache.append(k, v)
    (k_codes, k_scale), (v_codes, v_scale) = cache._k.part(0, 20), cache._v.part(0, 20)
    stored = (k, v, 0.3, None, None) if format == "float32" else (k_codes, v_codes, 0.3, k_scale, v_scale)
    q = torch.randn(2, 4, 40, 3).mT
    mask, sink = torch.randn(2, 4, 3, 20), torch.randn(4)
    torch.library.opcheck(torch.ops.lowbit.decode.default, (q, *stored, format == "int4", True, 17, 5, 24, mask, sink))
    if format != "float32":
        torch.library.opcheck(torch.ops.lowbit.kv_quantize_.default, (k, k_codes.clone(), k_scale.clone(), format == "int4"))
        torch.library.opcheck(torch.ops.lowbit.kv_dequantize_.default, (k_codes, k_scale, torch.empty(2, 2, 20, 40), format == "int4"))


@pytest.mark.parametrize(
    "change, kind, text",
    [
        ({0: torch.zeros(2, 40, 16)}, ValueError, "attention_forward: query must have shape"),
        ({0: torch.zeros(2, 4, 40, 16, dtype=torch.int16)}, TypeError, "attention_forward: query must be float32"),
        ({5: torch.zeros(2, 4, 39, 40)}, ValueError, "attention_forward: mask must have shape"),
        ({7: torch.zeros(3, dtype=torch.int64)}, TypeError, "attention_forward: seed must be one int64"),
        ({12: [torch.zeros(1, dtype=torch.int32)]}, ValueError, "attention_forward: blocks must be"),
        ({13: [128]}, ValueError, "attention_forward: block_size must be two numbers"),
        ({8: [1]}, ValueError, "score program"),
    ],
)
def test_the_attention_op_names_what_is_wrong(change: dict[int, object], kind: type[Exception], text: str) -> None:
    q = torch.zeros(2, 4, 40, 16)
    arguments = [q, q, q, 1.0, False, None, 0.0, None, [], [], [], [], [], [128, 128], None]
    torch.ops.lowbit.attention_forward(*arguments)
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(kind, match=text):
        torch.ops.lowbit.attention_forward(*arguments)
