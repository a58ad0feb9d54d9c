# SPDX-License-Identifier: Apache-2.0
"""Optimizers over parameters of several devices, and `CPUOffloadOptimizer`: parameters there, states and steps here."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from another_device import model
from torch import nn

import lowbit
from lowbit.devices import simulated
from lowbit.optim import CPUOffloadOptimizer

simulated.enable()
DEVICE = "lowbit_sim:1"
CLASSES = [lowbit.optim.AdamW8bit, lowbit.optim.AdamW4bit, lowbit.optim.Lion8bit, lowbit.optim.AdamW, torch.optim.AdamW]


def set_gradients(*models: nn.Module, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    for together in zip(*(m.parameters() for m in models), strict=True):
        gradient = torch.randn(together[0].shape, generator=random)
        for parameter in together:
            parameter.grad = gradient.to(parameter)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("rounded", [False, True])
def test_parameters_of_one_group_may_lie_on_several_devices(rounded: bool) -> None:
    here, split = (model().bfloat16() for _ in range(2))
    split[0].to(DEVICE)
    options: dict[str, Any] = {"lr": 1e-2, "min_8bit_size": 1, "bf16_stochastic_round": rounded}
    # random bits are of the place of a parameter in a call, and there is one for each device
    alone = [here[0].parameters(), here[2].parameters()] if rounded else [here.parameters()]
    optimizers = [lowbit.optim.AdamW8bit(params, **options) for params in (*alone, split.parameters())]
    for seed in range(3):
        set_gradients(here, split, seed=seed)
        for optimizer in optimizers:
            optimizer.step()
    for p in split.parameters():
        assert {state.device for name, state in optimizers[-1].state[p].items() if name != "step"} == {p.device}
    assert equal(here[0], split[0]) and equal(here[2], split[2]) != rounded  # no two calls share their random bits


def pair(make: type, **options: Any) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, CPUOffloadOptimizer]:
    """A model here with its optimizer, and the same there with an offloaded one."""
    here, there = model(), model().to(DEVICE)
    return (
        here,
        there,
        make(here.parameters(), lr=1e-2, **options),
        CPUOffloadOptimizer(there.parameters(), make, lr=1e-2, **options),
    )


def train(m: nn.Module, optimizer: torch.optim.Optimizer, seed: int, clip: float | None = None) -> None:
    device = next(m.parameters()).device
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    m(x).square().sum().backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(m.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("make", CLASSES, ids=lambda make: f"{make.__module__.split('.')[0]}-{make.__name__}")
def test_steps_have_the_bits_of_the_cpu_and_states_lie_there(make: type, offload_gradients: bool) -> None:
    here, there, plain, _ = pair(make)
    offloaded = CPUOffloadOptimizer(
        there.parameters(), make, offload_gradients=offload_gradients, minimal_size=100, lr=1e-2
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (plain, offloaded)]
    for seed in range(4):
        for m, optimizer in ((here, plain), (there, offloaded)):
            train(m, optimizer, seed)
        for scheduler in schedulers:
            scheduler.step()
    assert equal(here, there)
    assert all(p.device == torch.device(DEVICE) for p in there.parameters())
    assert offloaded.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 1e-2 / 16
    for p in there.parameters():
        moments = [state for name, state in offloaded.state[p].items() if name != "step"]
        assert moments and {state.device.type for state in moments} == {"cpu" if p.numel() >= 100 else "lowbit_sim"}


def test_the_device_holds_no_state_and_no_gradient_that_was_offloaded() -> None:
    layer = nn.Linear(256, 256, bias=False).to(DEVICE)
    x, before = torch.randn(2, 256, device=DEVICE), simulated.live_bytes(DEVICE)
    optimizer = CPUOffloadOptimizer(layer.parameters(), lowbit.optim.AdamW8bit, offload_gradients=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and simulated.live_bytes(DEVICE) == before
    optimizer.step()
    assert simulated.live_bytes(DEVICE) == before
    layer(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"CPUOffloadOptimizer: offload_gradients=True must have a step\(\)"):
        layer(x).sum().backward()
    optimizer.zero_grad()
    layer.weight.grad = None
    layer(x).sum().backward()
    norm = nn.utils.clip_grad_norm_(optimizer.base_optimizer.param_groups[0]["params"], 1.0)
    torch.testing.assert_close(norm, (x.sum(0).cpu().square().sum() * 256).sqrt())


def test_an_optimizer_that_is_gone_moves_no_gradients() -> None:
    layer = nn.Linear(256, 256).to(DEVICE)
    optimizer = CPUOffloadOptimizer(layer.parameters(), lowbit.optim.AdamW8bit, offload_gradients=True)
    layer(torch.randn(2, 256, device=DEVICE)).sum().backward()
    assert layer.weight.grad is None
    del optimizer
    gc.collect()
    layer(torch.randn(2, 256, device=DEVICE)).sum().backward()
    assert layer.weight.grad.device == torch.device(DEVICE)


def test_accumulation_and_clipping_see_gradients_on_the_device() -> None:
    here, there, plain, offloaded = pair(lowbit.optim.AdamW8bit)
    for seed in range(3):
        for m, optimizer in ((here, plain), (there, offloaded)):
            m(torch.full((1, 64), float(seed)).to(next(m.parameters()).device)).square().sum().backward()
            train(m, optimizer, seed, clip=0.1)
    assert equal(here, there)


def test_a_grad_scaler_skips_a_step_with_inf() -> None:
    here, there, plain, offloaded = pair(lowbit.optim.AdamW8bit)
    for m, optimizer, device in ((here, plain, "cpu"), (there, offloaded, "lowbit_sim")):
        scaler = torch.amp.GradScaler(device, init_scale=256.0)
        for bad in (1.0, float("inf"), 1.0):
            set_gradients(m, seed=3)
            for p in m.parameters():
                p.grad = scaler.scale(p.grad) * bad
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 128.0
    assert equal(here, there)


def test_what_changes_between_steps_is_followed() -> None:
    here, there, plain, offloaded = pair(lowbit.optim.AdamW8bit)
    for m, optimizer in ((here, plain), (there, offloaded)):
        device = next(m.parameters()).device
        train(m, optimizer, 0)
        m.load_state_dict(copy.deepcopy(model().state_dict()))
        train(m, optimizer, 1)
        m[0].weight.data = m[0].weight.data.clone().mul_(2)
        m[0].weight.data.add_(0.5)
        train(m, optimizer, 2)
        extra = nn.Parameter(torch.linspace(-1, 1, 8192).to(device))
        optimizer.add_param_group({"params": [extra], "lr": 0.5, "optim_bits": 4})
        extra.grad = torch.linspace(1, -1, 8192).to(device)
        train(m, optimizer, 3)
        m.register_parameter("extra", extra)
    assert equal(here, there) and offloaded.param_groups[1]["state_format"] == "dynamic4"
    with pytest.raises(ValueError, match="Invalid learning rate"):
        offloaded.add_param_group({"params": [nn.Parameter(torch.zeros(8192, device=DEVICE))], "lr": -1})
    assert len(offloaded.param_groups) == len(offloaded.base_optimizer.param_groups) == 2
    train(there, offloaded, 4)


@pytest.mark.parametrize("make", CLASSES, ids=lambda make: f"{make.__module__.split('.')[0]}-{make.__name__}")
def test_state_dicts_go_between_offloaded_and_plain_optimizers(make: type) -> None:
    here, there, plain, offloaded = pair(make)
    for seed in range(2):
        for m, optimizer in ((here, plain), (there, offloaded)):
            train(m, optimizer, seed)
    saved, other = offloaded.state_dict(), plain.state_dict()
    assert [list(state) for state in saved["state"].values()] == [list(state) for state in other["state"].values()]
    assert saved["param_groups"] == other["param_groups"]
    _, _, plain_again, offloaded_again = pair(make)
    there_again, here_again = copy.deepcopy(there), copy.deepcopy(here)
    plain_again = make(here_again.parameters(), lr=0.5)
    offloaded_again = CPUOffloadOptimizer(there_again.parameters(), make, lr=0.5)
    plain_again.load_state_dict(copy.deepcopy(saved))
    offloaded_again.load_state_dict(copy.deepcopy(other))
    assert offloaded_again.param_groups[0]["lr"] == 1e-2
    for m, optimizer in ((here, plain), (here_again, plain_again), (there_again, offloaded_again)):
        train(m, optimizer, 5)
    assert equal(here, here_again) and equal(here, there_again)


def test_bad_input_is_refused_by_name() -> None:
    there = model().to(DEVICE)
    optimizer = CPUOffloadOptimizer(there.parameters(), lowbit.optim.AdamW8bit)
    for given in ({"offloaded": [], "on-device": {}}, [], None):
        with pytest.raises(
            ValueError, match=r"CPUOffloadOptimizer.load_state_dict: state_dict must be a dict with a list param_groups"
        ):
            optimizer.load_state_dict(given)
    with pytest.raises(TypeError, match="CPUOffloadOptimizer: must not be pickled or copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(TypeError, match="optimizer_class must be a class of optimizers, got 3"):
        CPUOffloadOptimizer(there.parameters(), 3)
    with pytest.raises(ValueError, match="Invalid minimal_size value: -1"):
        CPUOffloadOptimizer(there.parameters(), minimal_size=-1)
    with pytest.raises(ValueError, match="Invalid offload_gradients value"):
        CPUOffloadOptimizer(there.parameters(), offload_gradients="yes")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        CPUOffloadOptimizer(there.parameters(), lr=-1.0)


def test_a_parameter_that_went_to_another_device_is_refused_before_any_step() -> None:
    there = model().to(DEVICE)
    optimizer = CPUOffloadOptimizer(there.parameters(), lowbit.optim.AdamW8bit)
    train(there, optimizer, 0)
    before = [p.detach().cpu() for p in there.parameters()]
    set_gradients(there)
    there[2].bias.grad = None
    torch.utils.swap_tensors(there[2].bias, nn.Parameter(there[2].bias.detach().cpu()))
    with pytest.raises(
        ValueError, match="must be on the device that they were on when they were added, lowbit_sim:1, got cpu"
    ):
        optimizer.step()
    assert all(torch.equal(p.cpu(), old) for p, old in zip(there.parameters(), before, strict=True))


def test_a_shard_on_a_device_is_refused() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("lowbit_sim", [0, 1])
        local = torch.randn(64, 64, device="lowbit_sim:0")
        shard = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        with pytest.raises(ValueError, match=r"must not be DTensors, got one on lowbit_sim:0; fully_shard\(\.\.\., offload_policy="):
            CPUOffloadOptimizer([shard], lowbit.optim.AdamW8bit)
    finally:
        torch.distributed.destroy_process_group()


def test_quantized_layers_train_their_adapters_there() -> None:
    """QLoRA: a frozen nf4 base and adapters on the device, the 8-bit states of the adapters on the CPU."""
    peft = pytest.importorskip("peft")
    trained = []
    for device in ("cpu", DEVICE):
        base = model().to(device)
        lowbit.quantize_(base, lowbit.nf4_weight_only(group_size=64))
        torch.manual_seed(0)
        m = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=False))
        m.to(device)
        optimizer = CPUOffloadOptimizer(
            m.parameters(), lowbit.optim.AdamW8bit, minimal_size=0, min_8bit_size=1, lr=1e-2
        )
        for seed in range(3):
            train(m, optimizer, seed)
        assert {s.device.type for state in optimizer.state.values() for s in state.values()} == {"cpu"}
        trained.append(m)
    for p, q in zip(*(m.parameters() for m in trained), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-5)
