# SPDX-License-Identifier: Apache-2.0
"""Tensors of the device in programs: views, copies, autograd, modules, saving, compilation, streams."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from another_device import check_against_the_cpu
from torch import nn
from torch.nn import functional

from lowbit.devices import simulated

simulated.enable()
DEVICE, OTHER = "lowbit_sim:0", "lowbit_sim:1"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_values_survive_the_way_there_and_back(dtype: torch.dtype) -> None:
    here = (torch.randn(4, 6) * 4).to(dtype)
    there = here.to(OTHER)
    assert there.device == torch.device(OTHER) and there.dtype == dtype and there.stride() == here.stride()
    as_bytes = [tensor.view(torch.uint8) for tensor in (here, there.to(DEVICE).cpu())]
    assert torch.equal(*as_bytes)


def test_views_share_memory_and_writes_through_them_are_seen() -> None:
    x = torch.zeros(4, 6, device=DEVICE)
    for view in (x[1], x.t()[:, 2], x.view(24)[12:15], x.unfold(1, 2, 2)[3], x.as_strided((2,), (12,), 5)):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        view.add_(1)
    assert x.sum().item() == 6 + 6 + 3 + 6 + 2
    x.T.copy_(torch.arange(24.0).view(6, 4))
    assert x.cpu()[1].tolist() == [1, 5, 9, 13, 17, 21]


def test_lazy_conj_and_neg_are_carried_on_by_copies() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    there = z.to(DEVICE)
    assert torch.equal(there.conj().cpu(), z.conj()) and torch.equal(there.conj().imag.cpu(), z.conj().imag)


def test_an_out_argument_is_resized_and_filled() -> None:
    x, out = torch.randn(3, 4, device=DEVICE), torch.empty(0, device=DEVICE)
    assert torch.add(x, 1, out=out) is out and torch.equal(out, x + 1)
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
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    there = copy.deepcopy(here).to(OTHER)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (here, there)]
    for _ in range(3):
        x = torch.randn(5, 8)
        for model, optimizer, device in zip((here, there), optimizers, ("cpu", OTHER), strict=True):
            model(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(theirs.cpu(), mine)


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
    x = torch.randn(6, device=OTHER)
    file = io.BytesIO()
    torch.save({"x": x, "part": x[2:4]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["x"].device == torch.device(OTHER) and torch.equal(loaded["x"], x)
    assert loaded["part"].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["part"], x.cpu()[2:4])
    file.seek(0)
    assert torch.load(file, map_location=DEVICE)["x"].device == torch.device(DEVICE)
    copied = copy.deepcopy(x)
    assert copied.device == x.device and torch.equal(copied, x) and copied.data_ptr() != x.data_ptr()


def test_compiled_and_exported_programs_run() -> None:
    layer, x = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE)
    compiled = torch.compile(lambda x: layer(x).relu().sum(), backend="aot_eager")
    assert torch.equal(compiled(x), layer(x).relu().sum())
    compiled(x).backward()
    assert layer.weight.grad is not None
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_the_current_device_is_where_tensors_go() -> None:
    with torch.device("lowbit_sim"), torch.lowbit_sim.device(1):
        assert torch.empty(2).device == torch.device(OTHER)
    assert torch.lowbit_sim.current_device() == 0 and torch.accelerator.device_count() == 2
    assert torch.randn(3, device="lowbit_sim").device == torch.device(DEVICE)


def test_the_current_device_is_a_threads_own() -> None:
    seen = []

    def work() -> None:
        torch.accelerator.set_device_index(1)
        seen.append(torch.ones(2, device="lowbit_sim").sum().item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert seen == [2.0] * 4 and torch.accelerator.current_device_index() == 0


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
