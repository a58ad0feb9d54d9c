# SPDX-License-Identifier: Apache-2.0
"""Memory that is counted, ends where it is said to end, and faults on demand."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lowbit.devices import simulated

simulated.enable(devices=2, memory=1 << 26)
DEVICE = "lowbit_sim:0"


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    gc.collect()
    before = simulated.live_bytes()
    yield
    simulated.recover()
    gc.collect()
    assert simulated.live_bytes() == before, "a tensor was not freed"


def test_every_byte_is_counted_by_us_and_by_torch() -> None:
    before = simulated.live_bytes()
    x = torch.empty(1000, device=DEVICE)
    assert simulated.live_bytes() - before == 4096 and torch.accelerator.memory_allocated(0) == simulated.live_bytes()
    view = x[10:]
    del x
    assert simulated.live_bytes() - before == 4096
    del view
    assert simulated.live_bytes() == before and simulated.usage(DEVICE)["peak_bytes"] >= before + 4096
    assert simulated.live_bytes("lowbit_sim:1") == 0


def test_freed_memory_is_used_again() -> None:
    blocks = [torch.empty(1 << 22, dtype=torch.uint8, device=DEVICE) for _ in range(15)]
    del blocks[::2]
    again = [torch.empty(1 << 21, dtype=torch.uint8, device=DEVICE) for _ in range(16)]
    addresses = sorted([(t.data_ptr(), t.numel()) for t in (*blocks, *again)])
    assert all(a + size <= b for (a, size), (b, _) in zip(addresses, addresses[1:], strict=False))
    del blocks, again
    assert torch.empty(60 << 20, dtype=torch.uint8, device=DEVICE).numel() == 60 << 20


def test_the_memory_ends_and_the_error_has_the_figures() -> None:
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"lowbit_sim:0: out of memory: tried to allocate 67108868 bytes; \d+ of 67108864 bytes",
    ):
        torch.empty((1 << 24) + 1, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="lowbit_sim:1: out of memory"):
        torch.UntypedStorage(1 << 27, device="lowbit_sim:1")


def test_an_allocation_fails_on_demand() -> None:
    x = torch.ones(3, device=DEVICE)
    simulated.inject("memory", after=1, times=2)
    y = x.clone()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty_like(x)
    assert torch.equal(y, x.clone())


def test_a_launch_fails_on_demand_and_has_done_nothing() -> None:
    x = torch.ones(3, device=DEVICE)
    simulated.inject("launch", DEVICE, after=1)
    x.add_(1)
    with pytest.raises(RuntimeError, match="lowbit_sim:0: the launch failed"):
        x.add_(1)
    assert x.tolist() == [2, 2, 2]


def test_a_lost_device_stays_lost_until_it_recovers() -> None:
    x, other = torch.ones(3, device=DEVICE), torch.ones(3, device="lowbit_sim:1")
    simulated.inject("lost")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="lowbit_sim:0: the device is lost"):
            x.add_(1)
    with pytest.raises(RuntimeError, match="lost"):
        torch.empty(3, device=DEVICE)
    assert other.add_(1).tolist() == [2, 2, 2]
    simulated.recover()
    assert x.tolist() == [1, 1, 1]


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="memory, launch, lost or slow, got 'fire'"):
        simulated.inject("fire")
    with pytest.raises(ValueError, match="there is no device 5"):
        simulated.inject("lost", 5)
    with pytest.raises(ValueError, match="got cpu"):
        simulated.inject("lost", "cpu")


def test_an_operation_is_one_launch() -> None:
    x = torch.ones(3, device=DEVICE)
    before = simulated.launches()
    x.add_(1)
    assert simulated.launches() - before == 1


def test_enabling_again_with_other_numbers_is_refused() -> None:
    simulated.enable(devices=2, memory=1 << 26)
    with pytest.raises(RuntimeError, match="run already"):
        simulated.enable(devices=3)


def test_threads_run_and_free_at_once() -> None:
    wrong = []

    def work(device: str) -> None:
        for i in range(60):
            x = torch.full((257,), float(i), device=device)
            cycle = [x]
            cycle.append(cycle)  # freed by the collector, on any thread
            if (x * 2).sum().item() != 2 * 257 * i or x.cpu()[-1].item() != i:
                wrong.append((device, i))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, [f"lowbit_sim:{i % 2}" for i in range(6)]))
    assert not wrong
