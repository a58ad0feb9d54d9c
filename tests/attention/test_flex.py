# SPDX-License-Identifier: Apache-2.0
"""flex_attention against the dense float64 reference: results, gradients (also of captured tensors), lse, largest scores."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from settings import same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import AuxRequest, create_block_mask, flex_attention, testing
from lowbit.attention.packed import with_documents
from lowbit.reference.attention import attention as reference
from lowbit.score import program_cache

H, L, S = 4, 150, 260
# Results of at most a few units, sums of at most 190 terms: float32 2e-5, 16-bit dtypes their rounding times a small factor.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def mods() -> dict[str, tuple[Callable[..., Tensor] | None, list[Tensor]]]:
    """Name: the mod and what it captures with a gradient."""
    bias = torch.randn(2, H, L, S, requires_grad=True)
    table = torch.randn(H, L + S, requires_grad=True)
    slopes = torch.rand(H, requires_grad=True)
    scale = torch.tensor(0.7, requires_grad=True)
    rows = torch.randn(2, H, max(L, S), 3, requires_grad=True)
    ids = torch.randint(0, 4, (S,))
    types = torch.randn(4, 4, requires_grad=True)
    return {
        "none": (None, []),
        "identity": (lambda s, b, h, q, k: s, []),
        "relative": (lambda s, b, h, q, k: s + (q - k), []),
        "alibi": (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-8.0 * (h + 1) / H), []),
        "head scale": (lambda s, b, h, q, k: s * slopes[h], [slopes]),
        "scalar": (lambda s, b, h, q, k: s * scale, [scale]),
        "bias": (lambda s, b, h, q, k: s + bias[b, h, q, k], [bias]),
        "bias twice": (lambda s, b, h, q, k: s + bias[b, h, q, k] * bias[0, h, q, 3], [bias]),
        "toeplitz": (lambda s, b, h, q, k: s + table[h, q - k + S - 1], [table]),
        "softcap": (lambda s, b, h, q, k: 2 * torch.tanh(s / 2), []),
        "types": (lambda s, b, h, q, k: s + types[ids[q], ids[k]], [types]),
        "rows": (lambda s, b, h, q, k: s + (rows[b, h, q] * rows[b, h, k]).sum(-1), [rows]),
        "normalised table": (lambda s, b, h, q, k: s + torch.softmax(types, -1)[ids[q], ids[k]], [types]),
        "causal by where": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), []),
        "gelu": (lambda s, b, h, q, k: torch.nn.functional.gelu(s) - torch.log1p((q - k).abs() * slopes[h]), [slopes]),
    }


def mask_mods() -> dict[str, Callable[..., Tensor] | None]:
    documents = torch.arange(S) // 40
    padding = torch.tensor([100, 190])
    return {
        "none": None,
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q - k).abs() <= 20,
        "document": lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k),
        "padding": lambda b, h, q, k: k < padding[b],
        "heads": lambda b, h, q, k: k % (h + 2) == 0,
        "nothing": lambda b, h, q, k: (q > 1000) & (k > 1000),
    }


MODS, MASKS = list(mods()), list(mask_mods())


def compare(
    dtype: torch.dtype, mod: Callable[..., Tensor] | None, captured: Sequence[Tensor], mask_mod: Callable[..., Tensor] | None, *,
    shape: tuple[int, ...] = (2, H, H, L, S, 32, 24), block_size: Any = (32, 48), sink: Tensor | None = None, **options: Any,
) -> None:  # fmt: skip
    b, hq, hkv, length, kv_length, e, ev = shape
    q, k, v = (torch.randn(size, dtype=torch.float64).to(dtype).requires_grad_() for size in ((b, hq, length, e), (b, hkv, kv_length, e), (b, hkv, kv_length, ev)))
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, b, hq, length, kv_length, BLOCK_SIZE=block_size)
    out, aux = flex_attention(
        q, k, v, mod, block_mask, return_aux=AuxRequest(lse=True, max_scores=True), enable_gqa=hq != hkv, sink=sink, **options
    )
    wanted, lse, largest = reference(q, k, v, mod, mask_mod, sink=sink)
    assert out.dtype == dtype and out.shape == wanted.shape and aux.lse.dtype == aux.max_scores.dtype != torch.bfloat16
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    stats = 1e-12 if dtype == torch.float64 else 2e-5  # of the scores of these inputs, however they were rounded before
    torch.testing.assert_close(aux.lse.double(), lse, atol=stats * 10, rtol=stats)
    torch.testing.assert_close(aux.max_scores.double(), largest, atol=stats * 10, rtol=stats)
    assert not aux.max_scores.requires_grad
    inputs = [q, k, v, *captured] + ([] if sink is None else [sink])
    weight, lse_weight = torch.randn_like(out), torch.randn_like(aux.lse)
    seen = lse.detach() > -torch.inf
    grads = torch.autograd.grad((out, torch.where(seen, aux.lse, 0)), inputs, (weight, lse_weight))
    wants = torch.autograd.grad((wanted, torch.where(seen, lse, 0)), inputs, (weight.double(), lse_weight.double()))
    for grad, want in zip(grads, wants, strict=True):
        magnitude = want.abs().max().item() + 1
        assert grad.dtype == want.dtype
        assert (grad.double() - want.double()).abs().max() <= 4 * max(tolerance, TOLERANCE[grad.dtype]) * magnitude


@pytest.mark.parametrize("name", MODS)
def test_score_mods(name: str, any_forward_row: str) -> None:
    mod, captured = mods()[name]
    compare(testing.attention_dtypes(any_forward_row)[0], mod, captured, None)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, any_forward_row: str) -> None:
    compare(testing.attention_dtypes(any_forward_row)[0], None, (), mask_mods()[name])


@pytest.mark.parametrize(("name", "mask"), [(name, MASKS[i % len(MASKS)]) for i, name in enumerate(MODS * 2)])
def test_mods_with_masks_backward(name: str, mask: str, any_backward_row: str) -> None:
    mod, captured = mods()[name]
    compare(testing.attention_dtypes(any_backward_row)[0], mod, captured, mask_mods()[mask])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "mask"), list(itertools.product(["none", "bias", "toeplitz", "softcap"], ["none", "document", "nothing"])))
def test_dtypes(dtype: torch.dtype, name: str, mask: str) -> None:
    mod, captured = mods()[name]
    compare(dtype, mod, captured, mask_mods()[mask])


@pytest.mark.parametrize("shape", [(2, 4, 2, 150, 190, 16, 16), (1, 4, 1, 33, 100, 17, 40), (2, 4, 4, 1, 190, 32, 32), (1, 4, 4, 130, 1, 8, 8)], ids=str)
@pytest.mark.parametrize("block_size", [(128, 128), (16, 64), (100, 7)], ids=str)
def test_gqa_lengths_and_block_sizes(shape: tuple[int, ...], block_size: tuple[int, int]) -> None:
    mod, captured = mods()["toeplitz"]
    compare(torch.float32, mod, captured, mask_mods()["causal"], shape=shape, block_size=block_size)


@pytest.mark.parametrize("mask", ["none", "causal", "nothing"])
def test_sink(mask: str) -> None:
    mod, captured = mods()["head scale"]
    compare(torch.float32, mod, captured, mask_mods()[mask], sink=torch.randn(H, requires_grad=True))


def test_gradcheck() -> None:
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    bias = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(2, dtype=torch.float64, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, k: k <= q + 1, None, None, 5, 7, BLOCK_SIZE=2)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(
            q, k, v, lambda s, b, h, i, j: torch.tanh(s * scale[h]) + bias[h, i, j], mask, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse

    assert torch.autograd.gradcheck(attend, (q, k, v, bias, scale))


def test_result_is_the_same_for_any_number_of_threads() -> None:
    q, k, v = (torch.randn(1, 2, 300, 32, requires_grad=True) for _ in range(3))
    bias = torch.randn(600, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300)

    def run() -> list[Tensor]:
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i - j + 299], mask, dropout_p=0.0)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))]

    same_for_any_threads(run)


def test_a_batch_of_one_of_keys_serves_all_with_a_block_mask() -> None:
    q, k, v = torch.randn(3, 2, 40, 16), torch.randn(1, 2, 60, 16), torch.randn(1, 2, 60, 16)
    mask_mod = lambda b, h, q, k: k < 20 * (b + 1)  # noqa: E731
    out = flex_attention(q, k, v, block_mask=create_block_mask(mask_mod, 3, None, 40, 60, BLOCK_SIZE=16))
    torch.testing.assert_close(out.double(), reference(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), None, mask_mod)[0], atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("causal", (False, True))
def test_documents_by_where_they_begin(causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    starts = torch.tensor([0, 30, 30, 71, 100], dtype=torch.int32)
    ids = torch.tensor([0] * 30 + [2] * 41 + [3] * 29)
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, BLOCK_SIZE=16) if causal else None
    out = flex_attention(q, k, v, block_mask=block_mask, cu_seqlens=starts)
    wanted = reference(q, k, v, None, lambda b, h, q, k: (ids[q] == ids[k]) & ((q >= k) | (not causal)))[0]
    torch.testing.assert_close(out.double(), wanted, atol=5e-5, rtol=5e-5)


def test_dropout_keeps_the_mean_and_repeats_with_the_seed() -> None:
    q, k, v = torch.randn(2, 4, 64, 16), torch.randn(2, 4, 200, 16), torch.ones(2, 4, 200, 16)
    torch.manual_seed(3)
    out = flex_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(out, flex_attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(out, flex_attention(q, k, v, dropout_p=0.5))
    assert abs(out.mean() - 1) < 0.05 and out.std() > 0.01


def test_paged_blocks_in_any_order() -> None:
    q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, BLOCK_SIZE=16)
    shuffled = lowbit.BlockMask.from_kv_blocks(
        mask.full_kv_num_blocks, mask.full_kv_indices.clone(), BLOCK_SIZE=16, seq_lengths=(64, 64), mask_mod=lowbit.noop_mask
    )
    shuffled.kv_indices[0, 0, 3, :3] = torch.tensor([2, 0, 1], dtype=torch.int32)
    wanted = reference(q, k, v, None, lambda b, h, q, k: k < q // 16 * 16)[0]
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=shuffled).double(), wanted, atol=5e-5, rtol=5e-5)


def test_an_unknown_op_runs_through_torch_with_one_warning() -> None:
    bias = torch.randn(H, L, S, requires_grad=True)
    mod = lambda s, b, h, q, k: torch.lgamma(s.abs() + 2) + bias[h, q, k]  # noqa: E731
    fancy = lambda b, h, q, k: torch.special.bessel_j0((q - k) / 9) > 0  # noqa: E731
    program_cache._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for mask in ("none", "document", "nothing"):
            compare(torch.float32, mod, [bias], mask_mods()[mask])
        compare(torch.float64, mod, [bias], mask_mods()["causal"], sink=torch.randn(H, requires_grad=True))
        compare(torch.float32, None, (), fancy)
    texts = [str(warning.message) for warning in caught]
    assert sum("score_mod uses aten.lgamma" in text for text in texts) == 1
    assert sum("mask_mod uses aten.special_bessel_j0" in text for text in texts) == 1


THROUGH_TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "row": (lambda t, h, i, j: t[h, i].sum(), lambda t, h, i, j: t[h, i].sum()),
    "ellipsis": (lambda t, h, i, j: t[..., j][h, 0] + t[-1, :, h][j], lambda t, h, i, j: t[h, 0, j] + t[-1, j, h]),
    "gather": (lambda t, h, i, j: torch.gather(t[0, 0], 0, j.reshape(1).long())[0], lambda t, h, i, j: t[0, 0, j]),
    "list": (lambda t, h, i, j: t[[0, 2]][1, i, j], lambda t, h, i, j: t[2, i, j]),
    "row of several": (lambda t, h, i, j: torch.linalg.vector_norm(t[h, i]), lambda t, h, i, j: (t[h, i] * t[h, i]).sum().sqrt()),
}


@pytest.mark.parametrize("name", THROUGH_TORCH)
def test_gradients_through_torch_are_those_of_the_program(name: str) -> None:
    q = torch.randn(2, H, 9, 8, dtype=torch.float64, requires_grad=True)
    table = torch.randn(H, 9, 9, dtype=torch.float64, requires_grad=True)
    unknown, known = THROUGH_TORCH[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = flex_attention(q, q, q, lambda s, b, h, i, j: s + unknown(table, h, i, j) + torch.lgamma(j + 1.0) * 0)
    wanted = flex_attention(q, q, q, lambda s, b, h, i, j: s + known(table, h, i, j))
    torch.testing.assert_close(found, wanted)
    for a, b in zip(*(torch.autograd.grad(out.sin().sum(), (q, table)) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("block_size", [16, (32, 48)])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_the_block_mask_of_their_mask_mod(block_size: Any, causal: bool) -> None:
    cu_seqlens = torch.tensor([0, 0, 7, 64, 64, 96, 131], dtype=torch.int32)
    ids = torch.searchsorted(cu_seqlens[1:], torch.arange(131, dtype=torch.int32), right=True)
    inner = (lambda b, h, i, j: i >= j) if causal else (lambda b, h, i, j: i >= 0)
    wanted = create_block_mask(lambda b, h, i, j: inner(b, h, i, j) & (ids[i] == ids[j]), None, None, 131, 131, BLOCK_SIZE=block_size)
    x = torch.randn(1, 1, 131, 8)
    found = with_documents(cu_seqlens, create_block_mask(inner, None, None, 131, 131, BLOCK_SIZE=block_size), x, x)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    torch.testing.assert_close(flex_attention(x, x, x, block_mask=found), flex_attention(x, x, x, block_mask=wanted))


def test_a_block_mask_for_more_batches_and_heads_serves_the_first() -> None:
    ids = torch.arange(L) // 40
    mod = lambda b, h, i, j: (ids[i] + b >= ids[j]) & (h * 10 <= i)  # noqa: E731
    q = torch.randn(1, 2, L, 16)
    many, one = (create_block_mask(mod, batch, heads, L, L, BLOCK_SIZE=32) for batch, heads in ((4, H), (1, 2)))
    assert torch.equal(flex_attention(q, q, q, block_mask=many), flex_attention(q, q, q, block_mask=one))


def test_memory_grows_with_the_length_not_with_its_square(python: Callable[..., str]) -> None:
    """16384 x 16384 float32 scores would be 1 GiB; what is needed beside q, k, v and their gradients is under 64 MiB."""
    code = """
import resource, torch, lowbit
q, k, v = (torch.randn(1, 1, 16384, 16, requires_grad=True) for _ in range(3))
mask = lowbit.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 500), None, None, 16384, 16384)
lowbit.flex_attention(q[:, :, :256], k[:, :, :256], v[:, :, :256]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lowbit.flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s) + (j - i) * 0.01, mask).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(python(code)) < 64 * 1024


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_results_and_gradients_have_the_order_of_the_strides(order: tuple[int, ...]) -> None:
    sizes = torch.tensor([2, 4, 6])  # B, H, L in the order of memory
    storage = [torch.randn(*sizes[list(order)].tolist(), 8, requires_grad=True) for _ in range(3)]
    q, k, v = (tensor.permute(*(order.index(i) for i in range(3)), 3) for tensor in storage)
    assert q.shape == (2, 4, 6, 8)
    out = flex_attention(q, k, v)
    assert out.stride() == q.stride()
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    for gradient, tensor in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.stride() == tensor.stride()
    assert flex_attention(q.mT.contiguous().mT, k, v).is_contiguous()


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_keys_of_another_dtype(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    wide = [torch.randn(1, 2, 20, 8) for _ in range(3)]
    torch._dynamo.reset()
    q, k, v = wide[0].to(q_dtype), wide[1].to(kv_dtype), wide[2].to(kv_dtype)
    q.requires_grad_()
    out = flex_attention(q, k, v)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(tensor.double() for tensor in (q, k, v)))
    assert out.dtype == q_dtype
    torch.testing.assert_close(out.double(), wanted, atol=0.01 if q_dtype == torch.bfloat16 else 1e-5, rtol=0.01)
    assert torch.autograd.grad(out.sum(), q)[0].dtype == q_dtype
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), out)


def test_scores_that_are_nan_make_the_result_and_lse_nan_also_beside_hidden_keys(any_forward_row: str, subtests: pytest.Subtests) -> None:
    length, dtype = max(16, *testing.fewest_scores(any_forward_row)), testing.attention_dtypes(any_forward_row)[0]
    q, k, v = (torch.randn(1, 1, length, 8).to(dtype) for _ in range(3))
    mask = lowbit.create_block_mask(lambda b, h, i, j: j <= 0, 1, 1, length, length, BLOCK_SIZE=16)
    for block_mask in (None, mask):
        with subtests.test(masked=block_mask is not None):
            out, aux = lowbit.flex_attention(
                q, k, v, lambda s, b, h, i, j: s * float("nan"), block_mask, return_aux=lowbit.AuxRequest(lse=True)
            )
            assert out.isnan().all() and aux.lse.isnan().all()
