# SPDX-License-Identifier: Apache-2.0
"""The ops attention_forward and attention_backward: programs, block lists, sink, log-sum-exp, on every row, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from row_fixture import fixture_of
from settings import same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import _C, testing
from lowbit.ops.attention import attention
from lowbit.score.program import ProgramBuilder

Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ROWS = [row for op in ("attention_forward", "attention_backward") for row in testing.rows(op) if "_decode_" not in str(row["name"])]


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, mod: Mod | None = None, keep: Tensor | None = None, sink: Tensor | None = None):
    """out, lse, largest score, in float64 and differentiable."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    b, h, length, kv_length = scores.shape
    if mod is not None:
        index = [torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate((b, h, length, kv_length))]
        scores = mod(scores, *index)
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    columns = scores if sink is None else torch.cat([scores, sink[None, :, None, None].expand(b, h, length, 1)], -1)
    empty = (columns == -math.inf).all(-1)
    lse = columns.masked_fill(empty[..., None], 0.0).logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    return p @ v.repeat_interleave(group, 1), lse.masked_fill(empty, -math.inf), scores.amax(-1)


def bias_program() -> list[int]:
    """3 * tanh(score + bias[h, q, k] + table[q - k + 400])"""
    p = ProgramBuilder()
    bias, table = p.captured("float", 3), p.captured("float", 1)
    score = p.op("add", p.op("score"), p.gather(bias, p.op("h"), p.op("q"), p.op("k")))
    place = p.op("add", p.op("sub", p.op("q"), p.op("k")), p.constant(400))
    return p.finish(p.op("mul", p.op("tanh", p.op("add", score, p.gather(table, place))), p.constant(3.0)))


def window_program() -> list[int]:
    """k <= q + 100"""
    p = ProgramBuilder()
    return p.finish(p.op("le", p.op("k"), p.op("add", p.op("q"), p.constant(100))))


row = fixture_of(ROWS)


@pytest.mark.core
def test_programs_sink_and_lse_with_all_gradients(row: str) -> None:
    dtype = testing.attention_dtypes(row)[0]
    budget = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    real = torch.float64 if dtype == torch.float64 else torch.float32
    b, h, length, kv_length = 2, 4, 150, 300
    shapes = ((b, h, length, 20), (b, 2, kv_length, 20), (b, 2, kv_length, 12), (h, length, kv_length), (1000,), (h,))
    q, k, v = (torch.randn(shape, dtype=real).to(dtype).requires_grad_() for shape in shapes[:3])
    bias, table, sink = (torch.randn(shape, dtype=real, requires_grad=True) for shape in shapes[3:])
    with lowbit.force_kernel(row):
        out, lse, largest = attention(
            q, k, v, scale=0.3, score_mod=bias_program(), score_captured=[bias, table], mask_mod=window_program(), sink=sink, want_max_scores=True
        )
        grads = torch.randn_like(out), torch.randn_like(lse)
        ours = torch.autograd.grad((out, lse), (q, k, v, bias, table, sink), grads)
    assert _C.last_kernel("attention_backward" if "backward" in row else "attention_forward") == row
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias, table, sink)]
    keep = torch.arange(kv_length) <= torch.arange(length)[:, None] + 100
    mod: Mod = lambda s, b, h, i, j: 3 * torch.tanh(s + wide[3][h, i, j] + wide[4][i - j + 400])  # noqa: E731
    wanted = reference(*wide[:3], 0.3, mod, keep, wide[5])
    for a, w in zip((out, lse, largest), wanted, strict=True):
        assert (a.double() - w).abs().max() <= budget * max(1, w.abs().max())
    for name, a, w in zip(("q", "k", "v", "bias", "table", "sink"), ours, torch.autograd.grad(wanted[:2], wide, [g.double() for g in grads]), strict=True):
        assert (a.double() - w).abs().max() <= budget * max(1, w.abs().max()), name


def block_lists(classes: Tensor) -> list[Tensor]:
    """kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices of classes 0 empty, 1 partial, 2 full; indices in falling order."""
    lists = []
    for wanted in (1, 2):
        here = classes == wanted
        lists += [here.sum(-1).int(), here.flip(-1).int().argsort(dim=-1, descending=True, stable=True).int()]
        lists[-1] = (classes.shape[-1] - 1 - lists[-1]).int()
    return lists


@pytest.mark.parametrize("block", [(128, 128), (16, 32), (1, 7), (200, 50)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_blocks_are_visited_and_only_they(block: tuple[int, int], sizes: tuple[int, int]) -> None:
    b, h, length, kv_length = 2, 4, 150, 210
    q_blocks, kv_blocks = -(-length // block[0]), -(-kv_length // block[1])
    classes = torch.randint(0, 3, (*sizes, q_blocks, kv_blocks))
    classes[..., 0, :] = 0  # a row of blocks that sees nothing
    q, k, v = (torch.randn(b, heads, n, 16, dtype=torch.float64, requires_grad=True) for heads, n in ((h, length), (2, kv_length), (2, kv_length)))
    inputs32 = [x.detach().float().requires_grad_() for x in (q, k, v)]
    dense = classes.repeat_interleave(block[0], 2)[:, :, :length].repeat_interleave(block[1], 3)[..., :kv_length]
    keep = (dense == 2) | ((dense == 1) & (torch.arange(kv_length) <= torch.arange(length)[:, None] + 100))
    options = {"scale": 0.25, "mask_mod": window_program(), "blocks": block_lists(classes), "block_size": block}
    wanted = reference(q, k, v, 0.25, keep=keep)[0]
    grad = torch.randn(b, h, length, 16)
    wanted_grads = torch.autograd.grad(wanted, (q, k, v), grad.double())
    for inputs, budget in (((q, k, v), 1e-12), (inputs32, 1e-5)):
        out, lse, _ = attention(*inputs, **options)
        assert (out.double() - wanted).abs().max() < budget
        assert torch.equal(lse == -math.inf, ~keep.expand(b, h, -1, -1).any(-1))
        for a, w in zip(torch.autograd.grad(out, inputs, grad.to(out.dtype)), wanted_grads, strict=True):
            assert (a.double() - w).abs().max() < 10 * budget


def test_a_list_without_full_blocks_and_one_tensor_less() -> None:
    q, k, v = (torch.randn(1, 1, 200, 16) for _ in range(3))
    classes = torch.tensor([[1, 0], [1, 1]]).view(1, 1, 2, 2)
    keep = (classes > 0).repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :200, :200]
    out, *_ = attention(q, k, v, scale=0.25, blocks=block_lists(classes)[:2])
    assert (out - reference(q.double(), k.double(), v.double(), 0.25, keep=keep)[0]).abs().max() < 1e-5


def test_the_gradient_of_the_log_sum_exp_alone() -> None:
    q, k, v = (torch.randn(1, 2, 30, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda q, k: attention(q, k, v, scale=0.5, causal=True)[1], (q, k))


def test_sink_and_captured_tensors_pass_gradcheck() -> None:
    q, k, v = (torch.randn(1, 2, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias, table = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True), torch.randn(800, dtype=torch.float64)[394:407].requires_grad_()
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    p = ProgramBuilder()
    first, second = p.captured("float", 3), p.captured("float", 1)
    shifted = p.op("add", p.op("sub", p.op("q"), p.op("k")), p.constant(6))
    code = p.finish(p.op("mul", p.op("add", p.op("score"), p.gather(first, p.op("h"), p.op("q"), p.op("k"))), p.gather(second, shifted)))

    def call(*inputs: Tensor) -> Tensor:
        return attention(*inputs[:3], scale=0.5, score_mod=code, score_captured=inputs[3:5], sink=inputs[5])[0]

    assert torch.autograd.gradcheck(call, (q, k, v, bias, table, sink))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 2), (6, 3)])
def test_gradients_of_programs_have_the_same_bits_for_any_number_of_threads(heads: int, kv_heads: int) -> None:
    q, k, v = (torch.randn(2, n, 200, 16, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    bias, table = torch.randn(heads, 200, 200, requires_grad=True), torch.randn(1000, requires_grad=True)

    def gradients(*captured: Tensor) -> tuple[Tensor, ...]:
        out, *_ = attention(q, k, v, scale=0.3, score_mod=bias_program(), score_captured=list(captured))
        return torch.autograd.grad(out.square().sum(), [x for x in (q, k, v, *captured) if x.requires_grad])

    both = same_for_any_threads(lambda: gradients(bias, table))
    alone = same_for_any_threads(lambda: gradients(bias.detach(), table.detach()))
    assert all(map(torch.equal, both[:3], alone)), "the schedules differ, the order of every sum does not"


def call_with(**changes: object) -> Callable[[], object]:
    q = torch.randn(1, 2, 8, 4)
    return lambda: attention(**{"q": q, "k": q, "v": q, "scale": 1.0} | changes)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"k": torch.randn(2, 2, 8, 4), "v": torch.randn(2, 2, 8, 4)}, ValueError, "key must have shape"),
        ({"k": torch.randn(1, 3, 8, 4), "v": torch.randn(1, 3, 8, 4)}, ValueError, "heads of query must be a multiple"),
        ({"v": torch.randn(1, 2, 7, 4)}, ValueError, "value must have shape"),
        ({"v": torch.randn(1, 2, 8, 4).half()}, TypeError, "value must be float32"),
        ({"sink": torch.randn(3)}, ValueError, "sink must have shape"),
        ({"mask": torch.zeros(1, 1, 1, 1, dtype=torch.int32)}, TypeError, "mask must be bool or floating"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p must be between 0 and 1"),
        ({"score_mod": [1, 2, 3]}, ValueError, "score program"),
        ({"blocks": [torch.zeros(1, 1, 1, dtype=torch.int32)] * 3}, ValueError, "blocks must be"),
        ({"blocks": block_lists(torch.ones(1, 3, 1, 1).long())}, ValueError, "block mask must have B, H"),
        ({"blocks": block_lists(torch.ones(1, 1, 1, 1).long()), "block_size": (4, 8)}, ValueError, "block mask must cover"),
        ({"blocks": block_lists(torch.ones(1, 1, 1, 3).long())}, ValueError, "kv_indices must be 0..0"),
        ({"blocks": block_lists(torch.ones(1, 1, 1, 1).long()), "block_size": (0, 8)}, ValueError, "block_size must be positive"),
        ({"blocks": [x.long() for x in block_lists(torch.ones(1, 1, 1, 1).long())]}, TypeError, "kv_num_blocks must be int32"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(changes: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call_with(**changes)()


def test_a_gather_out_of_range_is_an_index_error() -> None:
    p = ProgramBuilder()
    table = p.captured("float", 1)
    code = p.finish(p.op("add", p.op("score"), p.gather(table, p.op("k"))))
    with pytest.raises(IndexError):
        call_with(score_mod=code, score_captured=[torch.randn(5)])()


def test_more_queries_of_a_kv_head_than_a_thread_keeps_packed() -> None:
    """On tiles 64 MiB (amx_backward.hpp), of which one head alone needs half."""
    q, grad_out = (torch.randn(1, 2, 16500, 256).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 1, 200, 256).bfloat16() for _ in range(2))

    def gradients(heads: slice) -> tuple[Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in (q[:, heads], k, v)]
        out = lowbit.scaled_dot_product_attention(*inputs, enable_gqa=True)
        return torch.autograd.grad(out, inputs, grad_out[:, heads])

    both, alone = gradients(slice(0, 2)), [gradients(slice(h, h + 1)) for h in range(2)]
    assert torch.equal(both[0], torch.cat([grads[0] for grads in alone], 1))
    for together, *parts in zip(both[1:], *(grads[1:] for grads in alone), strict=True):
        wanted = sum(part.double() for part in parts)
        # Each of the three is rounded to 8 bits.
        assert (together.double() - wanted).abs().max() <= 3 * 2**-9 * max(part.abs().max().double() for part in (together, *parts))
