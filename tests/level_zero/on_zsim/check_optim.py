# SPDX-License-Identifier: Apache-2.0
"""Optimizers on an Intel GPU, which zsim is: parameters and states with the bits of the CPU's rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import _C
from lowbit.devices import level_zero
from lowbit.optim.base import LowBitOptimizer

level_zero.enable()
DEVICE = torch.device("lowbit_ze")
NUMELS = (1, 7, 128, 1000, 3 * 8192 + 5)
# CPUOffloadOptimizer, which steps on the CPU wherever its parameters lie, is in tests/devices/simulated/check_offload.py.
OPTIMIZERS = {
    name: (name, {}) for name, of in vars(lowbit.optim).items() if isinstance(of, type) and issubclass(of, LowBitOptimizer)
} | {
    "AdamW with amsgrad": ("AdamW", {"amsgrad": True}),
    "AdamW8bit with amsgrad": ("AdamW8bit", {"amsgrad": True}),
    "AdamW4bit with amsgrad": ("AdamW4bit", {"amsgrad": True}),
    "SGD8bit with momentum": ("SGD8bit", {"momentum": 0.9, "nesterov": True}),
    **{name: (name, {"ns_dtype": torch.float32}) for name in ("Muon", "Muon8bit")},  # a device's default is bfloat16
}


def params(dtype: torch.dtype, device: torch.device, *rows: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*rows, numel).to(dtype).to(device)) for numel in NUMELS]


def bits(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    of, options = OPTIMIZERS[name]
    options = {"lr": 1e-2} | options
    if of != "AdamW":
        options["min_8bit_size"] = 0
    if dtype == torch.bfloat16:
        options["bf16_stochastic_round"] = True
    muon = of.startswith("Muon")  # takes matrices, and its last step is that of plain SGD
    rows = (2,) if muon else ()
    sides = []
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(1)
        ours = params(dtype, device, *rows)
        optimizer = getattr(lowbit.optim, of)(ours, **options)
        for step in range(3):
            torch.manual_seed(10 + step)
            for param in ours:
                grad = torch.randn(param.shape) * 10.0 ** (2 - step)
                grad[::5] = 0
                param.grad = grad.to(dtype).to(device)
            torch.manual_seed(20 + step)  # of stochastic rounding
            optimizer.step()
        sides.append((ours, optimizer))
    (cpu, of_cpu), (there, of_there) = sides
    last = "float32" if muon else of_there.param_groups[0]["state_format"]
    assert _C.last_kernel("optim_step") == f"optim_step_{last}_level_zero"
    for expected, got in zip(cpu, there, strict=True):
        assert torch.equal(bits(expected), bits(got))
        kept, wanted = of_there.state[got], of_cpu.state[expected]
        assert kept.keys() == wanted.keys()
        for key, value in wanted.items():
            for one, other in zip(parts(value), parts(kept[key]), strict=True):
                assert torch.equal(bits(one), bits(other)), key


def parts(value: object) -> list[Tensor]:
    """The tensors of a state: itself, or codes and scales."""
    if isinstance(value, Tensor) and type(value) is Tensor:
        return [value]
    return [part for part in vars(value).values() if isinstance(part, Tensor)]


def test_a_state_goes_to_disk_and_back() -> None:
    ours = params(torch.float32, DEVICE)
    optimizer = lowbit.optim.AdamW8bit(ours, min_8bit_size=0)
    for param in ours:
        param.grad = torch.ones_like(param)
    optimizer.step()
    again = lowbit.optim.AdamW8bit(params(torch.float32, DEVICE), min_8bit_size=0)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(
        bits(next(iter(again.state.values()))["step"]), bits(next(iter(optimizer.state.values()))["step"])
    )


def test_what_no_module_is_for_says_so() -> None:
    ours = params(torch.float32, DEVICE)
    optimizer = lowbit.optim.AdamW8bit(ours, min_8bit_size=0, block_size=64)
    for param in ours:
        param.grad = torch.ones_like(param)
    with pytest.raises(NotImplementedError, match="optim_step_dynamic8_level_zero: blocks of another size than 256"):
        optimizer.step()
