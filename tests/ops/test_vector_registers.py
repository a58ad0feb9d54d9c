# SPDX-License-Identifier: Apache-2.0
"""No kernel returns with the upper halves of the vector registers in use.

Until they are cleared, every switch between AVX and SSE code in the process costs 0.3 us: a call of a small layer
took 7 us instead of 5. gcc leaves vzeroupper out around calls of functions that take a vector by value, or that use
none (csrc/cpu/vector_io.hpp).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from settings import ambient

import lowbit
from lowbit import _C, testing
from lowbit.ops.attention import attention

_CPU = Path("/proc/cpuinfo")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not _CPU.exists() or "xgetbv1" not in _CPU.read_text(),
    reason="the CPU does not say what is in use",
)
CLEAR = b"\xc5\xf8\x77\xc3"  # vzeroupper; ret
IN_USE = b"\xb9\x01\x00\x00\x00\x0f\x01\xd0\xc3"  # mov ecx, 1; xgetbv; ret
UPPER_HALVES = 1 << 2 | 1 << 6  # of ymm, of zmm


def machine_code(code: bytes) -> Callable[[], int]:
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    function = ctypes.CFUNCTYPE(ctypes.c_uint32)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    function.memory = memory
    return function


@pytest.fixture
def leaves_in_use() -> Iterator[Callable[[Callable[[], object]], int]]:
    """A function that runs one on one thread and returns which upper halves are in use behind it."""
    clear, in_use = machine_code(CLEAR), machine_code(IN_USE)

    def of(run: Callable[[], object]) -> int:
        clear()
        run()
        return in_use() & UPPER_HALVES

    with ambient("threads 1"):
        yield of


def test_of_a_layer(leaves_in_use: Callable[[Callable[[], object]], int], subtests: pytest.Subtests) -> None:
    for row in testing.rows("linear"):
        for case in (
            testing.LinearCase(m, 37, 96, dtype, format, x_format=x_format, activation="gelu")
            for m in (1, 5, 40)
            for dtype in ("float32", "bfloat16")
            for format, x_format in [*itertools.product(("int4", "int8"), ("float", "int8_row")), ("fp8_e4m3", "float8_row")]
        ):
            with subtests.test(row=row["name"], what=str(case)):
                if testing.serves(str(row["name"]), case):
                    run = functools.partial(testing.run_linear, case, testing.make_data(case), str(row["name"]))
                    assert not leaves_in_use(run), f"{row['name']}: {case}"


@pytest.mark.parametrize("row", [row["name"] for row in testing.rows("quantize") if row["available"]])
@pytest.mark.parametrize("format", ["int4", "int8", "bfloat16"])
def test_of_quantize(leaves_in_use: Callable[[Callable[[], object]], int], row: str, format: str) -> None:
    weight = torch.randn(37, 96)
    with lowbit.force_kernel(row):
        assert not leaves_in_use(lambda: testing.pack_weight(weight, format))


def test_of_attention_and_its_gradient(leaves_in_use: Callable[[Callable[[], object]], int]) -> None:
    q, k, v = (torch.randn(1, 2, 70, 40, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 2, 70, 40)
    assert not leaves_in_use(lambda: attention(q.detach(), k.detach(), v.detach(), scale=0.2, causal=True))
    out, _, _ = attention(q, k, v, scale=0.2, causal=True)
    assert not leaves_in_use(lambda: out.backward(grad))
    assert _C.last_kernel("attention_backward")


def test_of_an_optimizer_step(leaves_in_use: Callable[[Callable[[], object]], int]) -> None:
    param = torch.nn.Parameter(torch.randn(5000))
    optimizer = lowbit.optim.AdamW8bit([param])
    for _ in range(2):
        param.grad = torch.randn(5000)
        assert not leaves_in_use(optimizer.step)
