# SPDX-License-Identifier: Apache-2.0
"""Primitives are kept between calls, by all that they depend on; a weight never is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from settings import ambient
from tests import internals

import lowbit
from lowbit import _C
from lowbit.testing import LinearCase, assert_within, make_data, run_linear

ROW = "linear_float32_onednn"


def case_of(m: int, n: int, k: int, **more: object) -> LinearCase:
    return LinearCase(m, n, k, "float32", "float32", **more)  # type: ignore[arg-type]


def check(case: LinearCase) -> None:
    data = make_data(case)
    assert_within(run_linear(case, data, ROW), data.wanted, data.allowed, str(case))


def test_a_number_of_threads_has_a_primitive_of_its_own(onednn: None) -> None:
    case = case_of(65, 256, 192)
    data = make_data(case)
    kept = []
    for count in (1, 3, 2, 1, 3):
        with ambient(f"threads {count}"):
            assert_within(run_linear(case, data, ROW), data.wanted, data.allowed, f"{count} threads")
            assert torch.get_num_threads() == count
        kept.append(internals.kept_primitives())
    assert kept[0] < kept[1] < kept[2] == kept[3] == kept[4] or kept[-1] == internals.MAX_KEPT


def test_shapes_and_chains_that_change_between_calls(onednn: None) -> None:
    for m, n, k in ((5, 33, 70), (6, 33, 70), (5, 34, 70), (5, 33, 140), (5, 33, 70)):
        for more in ({}, {"bias": "float32"}, {"mul": True}, {"add": True}, {"activation": "silu"}):
            check(case_of(m, n, k, **more))


def test_the_number_of_primitives_is_bounded(onednn: None) -> None:
    case = case_of(internals.MAX_KEPT + 20, 16, 64)
    data = make_data(case)
    with lowbit.force_kernel(ROW):
        for m in range(1, case.m + 1):
            y = torch.ops.lowbit.linear(data.x[:m], data.packed, *case.op_args)
            assert_within(y, data.wanted[:m], data.allowed[:m], f"m={m}")
    assert internals.kept_primitives() == internals.MAX_KEPT
    check(case_of(1, 16, 64))  # one that is there no longer


def test_a_weight_that_changes_where_it_lies_is_read_anew(onednn: None) -> None:
    case = case_of(3, 48, 128)
    first, second = make_data(case), make_data(case, weight=torch.randn(48, 128))
    assert not torch.equal(first.packed, second.packed) and torch.equal(first.x, second.x)
    run_linear(case, first, ROW)
    first.packed.copy_(second.packed)
    assert_within(run_linear(case, first, ROW), second.wanted, second.allowed)


def test_a_state_dict_that_is_loaded_in_place(onednn: None) -> None:
    torch.manual_seed(3)
    models = [torch.nn.Sequential(torch.nn.Linear(96, 64)) for _ in range(2)]
    for model in models:
        lowbit.quantize_(model, lowbit.float_weight())
        model[0].prefer(ROW)
    x = torch.randn(20, 96)
    one, two = (model(x) for model in models)
    at = models[0][0].weight.data_ptr()
    models[0].load_state_dict(models[1].state_dict())
    assert models[0][0].weight.data_ptr() == at and not torch.equal(one, two)
    assert torch.equal(models[0](x), two) and _C.last_kernel("linear") == ROW


def test_threads_that_call_at_once(onednn: None) -> None:
    cases = [case_of(m, 130, 192, activation="silu") for m in (1, 20, 33, 64)]

    def work(case: LinearCase) -> None:
        data = make_data(case)
        for _ in range(10):
            assert_within(run_linear(case, data, ROW), data.wanted, data.allowed, str(case))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, cases * 2))


def test_it_runs_on_the_threads_that_torch_has(onednn: None, python: Callable[..., str]) -> None:
    code = """
import os, torch, lowbit
torch.set_num_threads(3)
layer = torch.nn.Sequential(torch.nn.Linear(1024, 1024))
lowbit.quantize_(layer, lowbit.float_weight())
x = torch.randn(64, 1024)
layer(x), x @ x.T, torch.randn(1 << 20).exp()
before = len(os.listdir("/proc/self/task"))
with lowbit.force_kernel("linear_float32_onednn"):
    layer(x)
print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
"""
    assert python(code) == "0 3\n"


def test_a_forked_child_runs_them_alone(onednn: None, python: Callable[..., str]) -> None:
    """libgomp would wait for ever for the workers that the parent had."""
    code = """
import os, torch, lowbit
layer = torch.nn.Sequential(torch.nn.Linear(256, 256))
lowbit.quantize_(layer, lowbit.float_weight())
x = torch.randn(64, 256)
with lowbit.force_kernel("linear_float32_onednn"):
    wanted = layer(x)
    child = os.fork()
    if not child:
        os._exit(0 if torch.allclose(layer(x), wanted, atol=1e-5) else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code) == "0\n"
