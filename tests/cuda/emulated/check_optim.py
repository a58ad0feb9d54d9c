# SPDX-License-Identifier: Apache-2.0
"""Optimizers on the emulated GPU: the bits of the CPU's scalar rows, whatever the order of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from optim_steps import DTYPES, RULES, step, tensors
from settings import forced

import lowbit
from lowbit import _C
from lowbit.devices import simulated
from lowbit.testing import STATE_FORMATS

simulated.enable()
DEVICE = "lowbit_sim:1"


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("format", STATE_FORMATS)
def test_bits_are_those_of_the_cpu(name: str, format: str) -> None:
    """Of parameters, unscaled gradients, codes, scales and counts; parameters are rounded stochastically.

    A pair of dtypes is a kernel, 0.5 s of g++: rules and formats in turns have one half of the pairs or the other.
    """
    block_size = 128 if format == "dynamic4" else 256
    half = (list(RULES).index(name) + STATE_FORMATS.index(format)) % 2
    more = dict(grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0), seed=7, dtypes=DTYPES[half::2])
    here = step(f"optim_step_{format}_scalar", name, format, block_size, "cpu", **more)
    there = step(f"optim_step_{format}_cuda_sim", name, format, block_size, DEVICE, **more)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("block_size", [32, 64, 512, 1024, 2048, 4096])
def test_any_block(block_size: int) -> None:
    here = step("optim_step_dynamic8_scalar", "adamw", "dynamic8", block_size, "cpu", dtypes=DTYPES[:1])
    there = step("optim_step_dynamic8_cuda_sim", "adamw", "dynamic8", block_size, DEVICE, dtypes=DTYPES[:1])
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("format", ["dynamic8", "dynamic4"])
def test_memory_may_begin_anywhere(format: str) -> None:
    """Not at multiples of 16 bytes: elements are moved one by one."""
    here = step(f"optim_step_{format}_scalar", "adamw", format, 256, "cpu")
    there = step(f"optim_step_{format}_cuda_sim", "adamw", format, 256, DEVICE, first=1)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)


def test_order_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for seed in ("1", "2", "3"):
        monkeypatch.setenv("LOWBIT_EMULATED_SEED", seed)
        results.append(step("optim_step_dynamic8_cuda_sim", "adamw", "dynamic8", 256, DEVICE))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_found_inf_leaves_everything() -> None:
    before = [tensor for each in tensors("adamw", RULES["adamw"], "dynamic8", 256) for tensor in each]
    after = step("optim_step_dynamic8_cuda_sim", "adamw", "dynamic8", 256, DEVICE, found_inf=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_more_tensors_than_a_launch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """330 of them are two tables of at most 320, two launches each; bits of stochastic rounding know the position in the list."""
    log = tmp_path / "log"
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(log))

    def run(device: str, row: str) -> list[torch.Tensor]:
        params = [torch.full((i % 5,), 1.0 + i / 330, dtype=torch.bfloat16).to(device) for i in range(330)]
        grads = [torch.ones_like(p) for p in params]
        steps = [torch.zeros((), device=device) for _ in params]
        with forced(row):
            _C.OptimStep(_C.OPTIM_RULES["sgd"]["number"], _C.STATE_FORMATS["float32"], 256, params, grads, [], [], steps,
                         {"lr": 1e-3}, seed=5).run()  # fmt: skip
        return [t.cpu() for t in params + steps]

    here, there = run("cpu", "optim_step_float32_scalar"), run(DEVICE, "optim_step_float32_cuda_sim")
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    launches = [line.split() for line in log.read_text().splitlines() if line.startswith("launch")]
    assert [line[1] for line in launches] == ["count_steps", "optim_step"] * 2


@contextlib.contextmanager
def rows_of(backend: str) -> Iterator[None]:
    """Every step by the row of its state format on this backend."""
    step_of = _C.OptimStep
    names = {number: name for name, number in _C.STATE_FORMATS.items()}

    class Forced:
        def __init__(self, rule: int, format: int, *rest: object) -> None:
            self.row, self.step = f"optim_step_{names[format]}_{backend}", step_of(rule, format, *rest)

        def run(self) -> None:
            with forced(self.row):
                self.step.run()

    _C.OptimStep = Forced
    try:
        yield
    finally:
        _C.OptimStep = step_of


def test_an_optimizer_trains_there() -> None:
    def train(device: str, backend: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [torch.randn(70, 64).to(device).requires_grad_(), torch.randn(10).to(device).requires_grad_()]
        optimizer = lowbit.optim.AdamW8bit(params, lr=1e-2, min_8bit_size=64)
        for number in range(3):
            for param in params:
                param.grad = (param.detach().cpu() * (number + 1)).cos().to(device)
            with rows_of(backend):
                optimizer.step()
        return [p.detach().cpu() for p in params] + [s.cpu() for p in params for s in optimizer.state[p].values()]

    for a, b in zip(train("cpu", "scalar"), train(DEVICE, "cuda_sim"), strict=True):
        assert torch.equal(a, b)


def test_barriers() -> None:
    """Run by test_emulated.py once as it is and once without each barrier."""
    here = step("optim_step_dynamic8_scalar", "adamw", "dynamic8", 2048, "cpu")
    there = step("optim_step_dynamic8_cuda_sim", "adamw", "dynamic8", 2048, DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
