# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention for Intel GPUs on a CPU, by OpenCL: every option, within budgets of float64.

The modules are those that a GPU gets; mods are linked to them as a driver of Level Zero does it.
"""

from __future__ import annotations

import dataclasses

import opencl
import pytest
import torch
from tests.cuda.attention_calls import CASES, AttentionCase, assert_right, expected, make_data
from torch import Tensor

pytestmark = pytest.mark.skipif(bool(opencl.missing()), reason=opencl.missing())
FLOAT32 = torch.float32
OF_FLOAT32 = [
    dataclasses.replace(case, name=f"float32, {case.name}", dtype=FLOAT32, bias=case.bias if case.bias in (None, torch.bool) else FLOAT32)
    for case in CASES
    if case.name in ("plain 64", "causal, more queries", "odd head dims", "float mask", "softcap and window", "bool mask, dropout", "negative scale, sink",
                     "a factor and a bias, captured, of documents")
]  # fmt: skip
FORWARD_ALONE = ("alibi", "a learned bias of distances", "a factor and a bias, captured, of documents")
"""Of mods, which take seconds to link: each differs in one thing from another."""


@pytest.mark.parametrize("case", [*CASES, *OF_FLOAT32], ids=str)
def test_every_option_is_within_budget_of_float64(case: AttentionCase) -> None:
    from attention_on_opencl import Call

    data = make_data(case)
    call, wanted = Call(case, data), expected(case, data)
    got = call.forward()
    if not case.name.endswith(FORWARD_ALONE):
        got |= call.backward()
    if case.dtype != FLOAT32:
        narrow = Call(case, data, case.dtype)
        got |= {"narrow": narrow.forward()["out"]}
    assert_right(case, got, {name: pair for name, pair in wanted.items() if name in got})
    assert not call.mods.any or call.mods.faults.tolist() == [[0] * 4] * 2


BY_DPAS = ("plain 64", "causal 64", "causal 128", "256", "odd head dims", "smallest", "negative scale, sink", "bool mask, dropout", "float mask",
           "rows of finfo.min and of large scores", "documents, blocks of odd sizes", "probabilities below float16's normal numbers")  # fmt: skip


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("case", [case for case in CASES if case.name in BY_DPAS], ids=str)
def test_the_forward_by_dpas_is_within_budget_of_float64(case: AttentionCase, lanes: int) -> None:
    from attention_on_opencl import Call

    data = make_data(case)
    got = Call(case, data, lanes=lanes).forward() | {"narrow": Call(case, data, case.dtype, lanes).forward()["out"]}
    assert_right(case, got, {name: pair for name, pair in expected(case, data).items() if name in got})


@pytest.mark.parametrize("lanes", [8, 16])
def test_rows_of_any_strides_are_read_by_dpas(lanes: int) -> None:
    from attention_on_opencl import Call

    case = AttentionCase("strides", (2, 2, 1, 40, 50, 33, 17))  # rows of 66 and 34 bytes
    data = make_data(case)
    data.k = data.k.transpose(1, 2).contiguous().transpose(1, 2)
    got = Call(case, data, lanes=lanes).forward()
    assert_right(case, got, {name: pair for name, pair in expected(case, data).items() if name in got})


@pytest.mark.parametrize("lanes", [8, 16])
def test_inf_and_nan_stay_in_their_rows(lanes: int) -> None:
    from attention_on_opencl import Call

    case = AttentionCase("not finite", (1, 1, 1, 20, 40, 64, 64), torch.float16)
    data = make_data(case)
    data.q[0, 0, 3, 5], data.q[0, 0, 11, 0] = torch.inf, torch.nan
    out = Call(case, data, lanes=lanes).forward()["out"][0, 0]
    assert not out[[3, 11]].isfinite().any() and out[[i for i in range(20) if i not in (3, 11)]].isfinite().all()


def test_a_gather_out_of_range_is_noted_and_nothing_is_read() -> None:
    from attention_on_opencl import Call

    case = AttentionCase("far", (1, 1, 1, 8, 40, 16, 16), FLOAT32, score_mod=lambda s, b, h, q, k, t: s + t[k], captured=((30,),))
    call = Call(case, make_data(case))
    call.forward()
    (seen, tensor, dim, index), of_mask = call.mods.faults.tolist()
    assert (seen, tensor, dim) == (1, 0, 0) and 30 <= index < 40 and of_mask == [0] * 4


def far(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k > q + 20


def test_a_list_with_a_block_that_is_not_there_is_noted() -> None:
    from attention_on_opencl import Call

    case = AttentionCase("lists", (1, 1, 1, 64, 64, 16, 16), FLOAT32, mask_mod=far, block_size=(32, 32))
    call = Call(case, make_data(case))
    call.lists[1][0, 0, 0, 0] = 2
    call.forward()
    assert call.mods.faults[0, :2].tolist() == [1, -2]


def test_rows_that_see_nothing_are_zero() -> None:
    from attention_on_opencl import Call

    case = AttentionCase("nothing", (1, 1, 1, 40, 40, 16, 16), FLOAT32, mask_mod=far, block_size=(16, 16))
    call = Call(case, make_data(case))
    got = call.forward()
    assert not got["out"][:, :, 20:].any() and (got["lse"][:, :, 20:] == -torch.inf).all() and got["lse"][:, :, :19].isfinite().all()
