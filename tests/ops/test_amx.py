# SPDX-License-Identifier: Apache-2.0
"""The tile unit is a thing that a thread shares with others: with oneDNN's kernels in torch, with a forked child, with a signal.

That its rows are right is tested with all rows of linear; on machines without the unit by tests/cpp/test_emulated_tiles.py.
"""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from settings import ambient, in_child
from test_vector_registers import IN_USE, machine_code
from torch import Tensor

import lowbit
from lowbit import testing

ROWS = [row for row in testing.rows("linear") if row["backend"] == "amx"]
pytestmark = [
    pytest.mark.skipif(not ROWS or not ROWS[0]["available"], reason=str(ROWS[0]["reason"]) if ROWS else "not compiled"),
]
TILES = 1 << 17 | 1 << 18  # configuration and content, in what xgetbv says to be in use
CASES = [
    testing.LinearCase(m, 70, 257, "float32", format, group_size, x_format=x_format)
    for m, format, group_size, x_format in itertools.product(
        (16, 47), ("int8", "int4"), (0, 32, 128), ("int8_row", "float")
    )
] + [testing.LinearCase(47, 70, 257, "bfloat16", format) for format in ("float32", "bfloat16", "float16")]


def row(case: testing.LinearCase) -> str:
    return f"linear_{case.format}" + ("" if case.x_format == "float" else "_int8")


def result(case: testing.LinearCase, data: testing.LinearData) -> Tensor:
    return testing.run_linear(case, data, f"{row(case)}_amx")


@pytest.mark.parametrize("threads", [1, 2])
def test_between_calls_of_torch_that_use_it(threads: int) -> None:
    a, b = torch.randn(96, 128, dtype=torch.bfloat16), torch.randn(128, 160, dtype=torch.bfloat16)
    with ambient(f"threads {threads}"):
        product, datas = a @ b, [testing.make_data(case) for case in CASES]
        wanted = [result(case, data) for case, data in zip(CASES, datas, strict=True)]  # that it is right: test_linear.py
        for case, data, right in list(zip(CASES, datas, wanted, strict=True)) * 3:
            assert torch.equal(result(case, data), right)
            assert torch.equal(a @ b, product)


@pytest.fixture
def in_use() -> Iterator[Callable[[], int]]:
    """The register state in use, for a test that runs on one thread."""
    if "xgetbv1" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the CPU does not say what is in use")
    with ambient("threads 1"):
        yield machine_code(IN_USE)


def test_a_call_leaves_it_as_it_was(in_use: Callable[[], int]) -> None:
    for case in CASES:
        data = testing.make_data(case)
        assert not in_use() & TILES
        result(case, data)
        assert not in_use() & TILES, case


def test_attention_between_calls_of_torch_leaves_it_as_it_was(in_use: Callable[[], int]) -> None:
    q, k, v = (torch.randn(1, 2, 70, 40).bfloat16().requires_grad_() for _ in range(3))
    a, b = torch.randn(96, 128, dtype=torch.bfloat16), torch.randn(128, 160, dtype=torch.bfloat16)
    product, results = a @ b, []
    for _ in range(2):
        before = in_use() & TILES
        out = lowbit.scaled_dot_product_attention(q, k, v, is_causal=True)
        results.append([out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))])
        assert in_use() & TILES == before
        assert torch.equal(a @ b, product)
    assert lowbit._C.last_kernel("attention_forward") == "attention_forward_bfloat16_amx"
    assert lowbit._C.last_kernel("attention_backward") == "attention_backward_bfloat16_amx"
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_in_a_forked_child_and_under_a_signal() -> None:
    datas = [testing.make_data(case) for case in CASES]
    calls = [
        functools.partial(torch.ops.lowbit.linear, data.x, data.packed, *case.op_args)
        for case, data in zip(CASES, datas, strict=True)
    ]
    wanted = [call() for call in calls]
    assert lowbit._C.last_kernel("linear").endswith("_amx")
    handled = []

    def handler(*_: object) -> None:  # runs between two bytecodes; the signal itself comes at any instruction
        handled.append(calls[0]())
        signal.setitimer(signal.ITIMER_REAL, 1e-3)  # the next one when this one is done, however slow the machine is

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    try:
        for _ in range(100):
            assert all(torch.equal(call(), right) for call, right in zip(calls, wanted, strict=True))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert handled and all(torch.equal(made, wanted[0]) for made in handled)

    assert all(map(torch.equal, in_child(lambda: [call() for call in calls]), wanted))


def test_weights_of_many_rows_are_multiplied_by_the_scales_of_their_groups(subtests: pytest.Subtests) -> None:
    """From 128 rows of bfloat16 on; the second pass has 44."""
    for format, group_size in itertools.product(("int4", "int5", "fp4_e2m1"), (32, 64)):
        case = testing.LinearCase(300, 70, 257, "bfloat16", format, group_size)
        with subtests.test(str(case)):
            data = testing.make_data(case)
            testing.assert_within(result(case, data), data.wanted, data.allowed, str(case))


@pytest.mark.parametrize("group_size", [0, 32])
def test_rows_that_do_not_stay_in_l2_give_the_bits_of_vectors(group_size: int) -> None:
    """Then all panels of a task are multiplied over a block of k before the next block."""
    case = testing.LinearCase(256, 70, 4770, "float32", "int8", group_size, x_format="int8_row")
    data = testing.make_data(case)
    assert torch.equal(result(case, data), testing.run_linear(case, data, "linear_int8_int8_avx512_vnni"))


def test_fewer_rows_than_a_tile_go_to_vectors() -> None:
    case = testing.LinearCase(15, 70, 257, "float32", "int8", x_format="int8_row")
    with pytest.raises(NotImplementedError, match="linear_int8_int8_amx: fewer than 16 rows"):
        result(case, testing.make_data(case))
    testing.run_linear(case, testing.make_data(case))
    assert lowbit._C.last_kernel("linear") == "linear_int8_int8_avx512_vnni"
