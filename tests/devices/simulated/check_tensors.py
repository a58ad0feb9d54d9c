# SPDX-License-Identifier: Apache-2.0
"""Tensors of the device in programs: views, copies, autograd, modules, saving, compilation, streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import another_device
import pytest
import torch
from another_device import check_against_the_cpu
from torch import nn
from torch.nn import functional

from lowbit.devices import simulated

simulated.enable()
DEVICE, OTHER = "lowbit_sim:0", "lowbit_sim:1"


@pytest.mark.parametrize("dtype", another_device.DTYPES)
def test_values_survive_the_way_there_and_back(dtype: torch.dtype) -> None:
    another_device.check_values(dtype, OTHER)


def test_views_share_memory_and_writes_through_them_are_seen() -> None:
    another_device.check_views(DEVICE)


def test_lazy_conj_and_neg_are_carried_on_by_copies() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    there = z.to(DEVICE)
    assert torch.equal(there.conj().cpu(), z.conj()) and torch.equal(there.conj().imag.cpu(), z.conj().imag)


def test_a_tensor_is_resized() -> None:
    x = torch.randn(3, 4, device=DEVICE)
    values = x.cpu()
    x.resize_(5, 4)
    assert x.shape == (5, 4) and torch.equal(x[:3].cpu(), values)


def test_tensors_of_two_devices_do_not_mix_and_a_number_does() -> None:
    x, y = torch.ones(3, device=DEVICE), torch.ones(3, device=OTHER)
    with pytest.raises(RuntimeError, match="at least two devices"):
        x + y
    with pytest.raises(RuntimeError, match="at least two devices"):
        x + torch.ones(3)
    assert torch.equal(x + torch.tensor(2.0), x + 2) and x[torch.tensor([0, 2])].shape == (2,)


def test_a_model_trains_as_on_the_cpu() -> None:
    another_device.check_training(OTHER)


def test_gradients_cross_devices() -> None:
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    (x * 2).to(OTHER).mul(3).cpu().sum().backward()
    assert x.grad.device == torch.device(DEVICE) and x.grad.tolist() == [6, 6, 6]


def test_convolution_and_attention_give_the_values_of_the_cpu() -> None:
    for function, shapes in (
        (functional.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)]),
        (functional.conv_transpose1d, [(2, 3, 8), (3, 4, 3)]),
        (functional.scaled_dot_product_attention, [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)]),
    ):
        check_against_the_cpu(function, shapes, DEVICE)


def test_autocast_takes_products_in_the_low_dtype_and_sums_in_float32() -> None:
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    with torch.autocast("lowbit_sim", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16 and y.softmax(-1).dtype == torch.float32 and (x + 1).dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


def test_saving_loading_and_copying() -> None:
    another_device.check_files_and_copies(OTHER)


def test_compiled_and_exported_programs_run() -> None:
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    compiled = torch.compile(lambda x: layer(x).relu().sum(), backend="aot_eager")
    assert torch.equal(compiled(x), layer(x).relu().sum())
    compiled(x).backward()
    assert layer.weight.grad is not None
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_inductor_says_what_it_lacks() -> None:
    """And compiles for the CPU as before."""
    with pytest.raises(RuntimeError, match="Inductor has no code generator for lowbit_sim; backend='aot_eager' compiles for it"):
        torch.compile(lambda x: x.relu() + 1)(torch.ones(4, device=DEVICE))
    assert torch.equal(torch.compile(lambda x: x.relu() + 1)(torch.ones(4)), torch.full((4,), 2.0))


def test_the_current_device_is_where_tensors_go() -> None:
    with torch.device("lowbit_sim"), torch.lowbit_sim.device(1):
        assert torch.empty(2).device == torch.device(OTHER)
    assert torch.lowbit_sim.current_device() == 0 and torch.accelerator.device_count() == 2
    assert torch.randn(3, device="lowbit_sim").device == torch.device(DEVICE)


def test_the_current_device_is_a_threads_own() -> None:
    def work(_: int) -> float:
        torch.accelerator.set_device_index(1)
        return torch.ones(2, device="lowbit_sim").sum().item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [2.0] * 4
    assert torch.accelerator.current_device_index() == 0


def test_streams_are_told_apart_and_events_measure() -> None:
    stream = torch.Stream(device=OTHER)
    assert stream != torch.accelerator.current_stream(1)
    with stream:
        assert torch.accelerator.current_stream(1) == stream and torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0
    before, after = (torch.Event("lowbit_sim", enable_timing=True) for _ in range(2))
    x = torch.ones(2, device=DEVICE)
    before.record()
    simulated.inject("slow", microseconds=3000)
    x.add_(1)
    after.record()
    stream.wait_event(after)
    assert after.query() and before.elapsed_time(after) >= 3


def test_random_numbers_come_from_the_seed() -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device=DEVICE)
    state = torch.lowbit_sim.get_rng_state()
    second = torch.randn(4, device=DEVICE)
    torch.lowbit_sim.set_rng_state(state)
    assert torch.equal(torch.randn(4, device=DEVICE), second)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device=DEVICE), first)
