# SPDX-License-Identifier: Apache-2.0
"""In the hands of others: GradScaler, torch.compile, transformers' Trainer; memory, and parameters that change under the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import Case, copies, equal, parameters, run, set_grads, states

import lowbit
from lowbit import optim


def test_grad_scaler_hands_over_scale_and_overflow(case: Case) -> None:
    params = parameters()
    reference = copies(params)
    optimizer, plain = case.make(params, lr=0.01), case.make(reference, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)

    def backward(seed: int, bad: float | None) -> None:
        set_grads(params, reference, seed=seed)
        for p in params:
            p.grad = scaler.scale(p.grad)
        if bad is not None:
            params[0].grad[0, 0] = bad

    for seed in range(3):
        backward(seed, None)
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    assert equal(params, reference)
    torch.testing.assert_close(params[0].grad, reference[0].grad)  # unscaled in place, as torch's fused optimizers leave it
    before = copies(params)
    backward(7, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert equal(params, before) and scaler.get_scale() == 512.0
    assert [float(state["step"]) for state in states(optimizer)] == [3.0] * 3


def test_a_gradient_in_another_order_is_unscaled_too() -> None:
    p = nn.Parameter(torch.randn(64, 128))
    p.grad = torch.full((128, 64), 1024.0).t()
    optimizer = optim.AdamW8bit([p])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    optimizer.step()
    assert bool((p.grad == 1).all())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_step_is_the_eager_step(case: Case, fullgraph: bool) -> None:
    torch._dynamo.reset()
    params = parameters()
    reference = copies(params)
    optimizer, plain = case.make(params, lr=0.01), case.make(reference, lr=0.01)
    compiled = torch.compile(lambda: optimizer.step(), fullgraph=fullgraph, backend="aot_eager")
    for seed in range(3):
        set_grads(params, reference, seed=seed)
        compiled()
        plain.step()
    assert equal(params, reference)


def test_trainer_takes_it_through_optimizer_cls_and_kwargs(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=128)
    data = [{"input_ids": (ids := torch.arange(start, start + 16) % 128), "labels": ids} for start in range(32)]
    arguments = TrainingArguments(
        tmp_path, max_steps=30, per_device_train_batch_size=8, learning_rate=5e-3, report_to=[], logging_steps=10, use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(config), arguments, train_dataset=data, optimizer_cls_and_kwargs=(optim.AdamW8bit, {"lr": 5e-3, "min_8bit_size": 4096})
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), optim.AdamW8bit)
    assert losses[-1] < losses[0] / 2


def test_gradients_of_another_dtype() -> None:
    p, q = nn.Parameter(torch.randn(64, 128).bfloat16()), nn.Parameter(torch.zeros(64, 128))
    q.data.copy_(p)
    p.grad_dtype = torch.float32
    p.grad = torch.randn(64, 128)
    q.grad = p.grad.clone()
    for param in (p, q):
        optim.AdamW8bit([param], lr=0.01).step()
    assert torch.equal(p, q.bfloat16())


MEMORY = """
import resource, torch
from lowbit import optim
p = torch.nn.Parameter(torch.randn(1 << 24))
p.grad = torch.randn_like(p)
optimizer = optim.{name}([p])
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
torch.ones(1 << 22).add_(1)  # wakes the threads
optimizer.step()
before = peak()
optimizer.step()
print(peak() - before)
"""


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "Lion8bit"])
def test_a_step_needs_less_than_a_mebibyte(name: str, python: Callable[..., str]) -> None:
    assert int(python(MEMORY.format(name=name)).split()[-1]) < 1024


def test_state_is_there_from_the_start() -> None:
    params: list[Any] = [nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(64, 128), requires_grad=False)]
    optimizer = optim.AdamW8bit(params)
    assert list(optimizer.state) == [params[0]]  # a frozen parameter costs nothing
    addresses = [t.data_ptr() for t in optimizer.state[params[0]].values()]
    run(optimizer, params[:1], 2)
    assert [t.data_ptr() for t in optimizer.state[params[0]].values()] == addresses


def test_rows_are_listed() -> None:
    rows = [row["name"] for row in lowbit.kernels("optim_step")]
    formats = ["float32", "bfloat16", "dynamic8", "dynamic4", "float8"]
    assert rows[-5:] == [f"optim_step_{name}_scalar" for name in formats]
