# SPDX-License-Identifier: Apache-2.0
"""`lowbit.warmup` runs what it is told to, and leaves everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowbit


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> dict[str, object]:
        self.seen.append((*x.shape, int(torch.is_grad_enabled())))
        return {"y": [self.dropout(self.norm(self.layer(x))) * factor], "note": "text"}


@pytest.mark.parametrize("backward", [False, True])
def test_each_input_is_one_call_and_nothing_changes(backward: bool) -> None:
    model = Counting()
    model.layer.weight.grad = torch.ones(64, 64)
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    inputs = [(3, 64), torch.randn(5, 64), {"x": torch.randn(7, 64), "factor": 2.0}]
    state = torch.get_rng_state()
    lowbit.warmup(model, inputs, backward=backward)
    assert model.seen == [(rows, 64, int(backward)) for rows in (3, 5, 7)]
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(model.layer.weight.grad, torch.ones(64, 64)) and model.norm.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_run_the_kernels_of_the_backward() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lowbit.quantize_(model, lowbit.int8_weight_only(), filter_fn=lambda module, name: name == "1")
    with lowbit.profile() as profile:
        lowbit.warmup(model, [(3, 64)], backward=True)
    assert [record.op for record in profile.records] == ["linear", "dequantize"]  # the second for the gradient


def test_buffers_are_put_back_when_a_call_fails() -> None:
    class Failing(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise RuntimeError("no")

    model = Failing(8)
    with pytest.raises(RuntimeError, match="no"):
        lowbit.warmup(model, [torch.randn(4, 8)])
    assert model.num_batches_tracked == 0 and not model.running_mean.any()


def test_bad_inputs_are_named() -> None:
    with pytest.raises(TypeError, match="inputs must hold tensors, dicts of arguments or shapes, got float"):
        lowbit.warmup(nn.Linear(2, 2), [1.5])
    with pytest.raises(ValueError, match="has no floating parameter"):
        lowbit.warmup(nn.Identity(), [(1, 2)])
