# SPDX-License-Identifier: Apache-2.0
"""Rows of attention, decode and its codes on `lowbit_ze`; the GPU is zsim. Their kernels: test_attention_numbers.py."""

from __future__ import annotations

import os

import pytest
import torch
from tests import internals
from tests.cuda import attention_calls
from tests.cuda.attention_calls import CASES, AttentionCase, assert_right, expected, make_data
from tests.ops import test_decode as on_the_cpu

import lowbit
from lowbit import _C
from lowbit.devices import level_zero
from lowbit.score.program_cache import BoundProgram, bind
from lowbit.testing import assert_within

level_zero.enable()
DEVICE = "lowbit_ze:0"
UNIT = "dpas" if os.environ.get("ZSIM_DEVICE") else "tiles"
attention_calls.ROWS = (f"attention_forward_{UNIT}_level_zero", "attention_backward_tiles_level_zero")
NAMES = ("causal 64", "negative scale, sink", "bool mask, dropout", "softcap and window", "a factor and a bias, captured, of documents")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=str)
def test_attention_is_within_budget_of_float64(case: AttentionCase) -> None:
    data = make_data(case)
    assert_right(case, attention_calls.run(case, data, DEVICE), expected(case, data))


def test_flex_attention_with_a_captured_tensor_and_a_block_mask() -> None:
    q, k, v = (torch.randn(1, 2, 100, 32) for _ in range(3))
    bias, mask = torch.randn(2), lowbit.create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, BLOCK_SIZE=32)
    wanted = lowbit.flex_attention(q, k, v, lambda s, b, h, q, k: s + bias[h] * (q - k), mask)
    there = bias.to(DEVICE)
    got = lowbit.flex_attention(*(t.to(DEVICE) for t in (q, k, v)), lambda s, b, h, q, k: s + there[h] * (q - k), mask.to(DEVICE))
    assert _C.last_kernel("attention_forward") == "attention_forward_tiles_level_zero"  # float32
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 1, 40, 50), (1, 2, 1, 50), (40, 50)], ids=str)
def test_the_gradient_of_a_mask_is_that_of_float64(shape: tuple[int, ...]) -> None:
    q, k, v, grad = (torch.randn(2, 2, length, 32) for length in (40, 50, 50, 40))
    mask = torch.randn(shape)
    exact = mask.double().requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), exact).backward(grad.double())
    made = []
    for _ in range(2):
        here = mask.to(DEVICE).requires_grad_()
        lowbit.scaled_dot_product_attention(*(t.to(DEVICE) for t in (q, k, v)), here).backward(grad.to(DEVICE))
        made.append(here.grad.cpu())
    assert torch.equal(*made)  # work-groups add to the same elements
    torch.testing.assert_close(made[0].double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_nan_stays_where_it_comes_from_in_the_gradient_of_a_mask() -> None:
    q, mask, grad = torch.randn(1, 1, 9, 16, device=DEVICE), torch.zeros(9, 9, device=DEVICE).requires_grad_(), torch.ones(1, 1, 9, 16)
    grad[0, 0, 4, 0] = torch.nan
    lowbit.scaled_dot_product_attention(q, q, q, mask).backward(grad.to(DEVICE))
    assert mask.grad.cpu().isnan().all(1).tolist() == [row == 4 for row in range(9)] and mask.grad.cpu()[:4].isfinite().all()


def test_a_gather_out_of_range_is_an_index_error() -> None:
    q, bias, longer = torch.randn(1, 1, 40, 16, device=DEVICE), torch.randn(30, device=DEVICE), torch.randn(40, device=DEVICE)
    with pytest.raises(IndexError, match=r"score_mod reads index 3\d of dimension 0 of captured tensor 0, which has size 30"):
        lowbit.flex_attention(q, q, q, lambda s, b, h, q, k: s + bias[k])
    assert lowbit.flex_attention(q, q, q, lambda s, b, h, q, k: s + longer[k]).isfinite().all()  # by the same program


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_decode_is_within_budget_of_float64(kind: str) -> None:
    for case in on_the_cpu.cases(kind)[1:6]:
        data = on_the_cpu.make(case)
        assert_decoded(data, data.call, str(case))


MODS = [("int8", (1, 32, 8, 16, 300, 64, 64)), ("int4", (2, 20, 5, 4, 1289, 64, 48))]


@pytest.mark.parametrize("kind, shape", MODS)
def test_decode_with_a_score_mod_is_decode_with_that_mask(kind: str, shape: tuple[int, ...]) -> None:
    data = on_the_cpu.make(on_the_cpu.Case(shape, "float mask", kind, token_major=True))
    call, added = dict(data.call), data.call["mask"][0, :, 0].to(DEVICE)
    call.pop("mask")
    assert_decoded(data, call, "score_mod", score_mod=bind("test", lambda s, b, h, q, k: s + added[h, k], mask=False, dtype=data.q.dtype))


@pytest.mark.parametrize("kind, shape", MODS)
def test_decode_with_a_mask_mod_is_decode_with_that_window(kind: str, shape: tuple[int, ...]) -> None:
    data = on_the_cpu.make(on_the_cpu.Case(shape, "window", kind))
    call, window = dict(data.call), data.call["window"]
    call |= {"causal": False, "window": 0}
    assert_decoded(data, call, "mask_mod", mask_mod=bind("test", lambda b, h, q, k: (k <= q) & (q - k < window), mask=True))


def assert_decoded(data: on_the_cpu.Data, call: dict[str, object], what: str, **mods: BoundProgram) -> None:
    out, lse = torch.empty(data.out.shape, dtype=data.q.dtype, device=DEVICE), torch.empty(data.lse.shape, device=DEVICE)
    call = {name: there(value) for name, value in call.items()}
    programs = {name: mod.code for name, mod in mods.items()} | {name.replace("mod", "captured"): mod.captured for name, mod in mods.items()}
    internals.decode(data.q.to(DEVICE), call.pop("k"), call.pop("v"), out, call.pop("scale"), lse=lse, **call, **programs)
    assert _C.last_kernel("decode") == "decode_splits_level_zero"
    assert_within(out.cpu(), data.out, data.allowed, what)
    assert_within(lse.cpu(), data.lse, data.allowed_lse, f"lse of {what}")


def there(value: object) -> object:
    """Device tensors with the strides of the CPU's."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
    return made.copy_(value) if 0 not in value.stride() else value.to(DEVICE)


def test_codes_of_the_cache() -> None:
    x = torch.randn(2, 3, 5, 64)
    wanted, wanted_scale = on_the_cpu.quantized(x, "int4", False)
    codes, scale = torch.empty_like(wanted, device=DEVICE), torch.empty_like(wanted_scale, device=DEVICE)
    torch.ops.lowbit.kv_quantize_(x.to(DEVICE), codes, scale, rotate=False)
    assert torch.equal(codes.cpu(), wanted) and torch.equal(scale.cpu(), wanted_scale)
    back = torch.empty(x.shape, device=DEVICE)
    torch.ops.lowbit.kv_dequantize_(codes, scale, back, False)
    assert (back.cpu() - x).abs().amax() < 0.5
