# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on two gloo ranks: packed weights shard by panels, results and gradients stay those of the whole model."""

from __future__ import annotations

import copy
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import lowbit
from lowbit.formats import FORMATS

RANKS = 2


def build(index: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 72), nn.ReLU(), nn.Sequential(nn.Linear(72, 36), nn.ReLU(), nn.Linear(36, 9)))
    lowbit.quantize_(model, FORMATS[index]())
    return model


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(5, 64, 40)), nn.Parameter(torch.randn(5, 40, 32))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up = torch.einsum("tk,tjnk->tjn", hidden_states, self.gate_up_proj[top_k_index]).chunk(2, dim=-1)
        y = torch.einsum("tjk,tjnk->tjn", self.act_fn(gate) * up, self.down_proj[top_k_index])
        return (y * top_k_weights[..., None]).sum(1)


def check_experts(rank: int, mesh: Any) -> None:
    """A rank holds whole experts."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = Experts()
    lowbit.quantize_(whole, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    model = copy.deepcopy(whole)
    fully_shard(model, mesh=mesh)
    mine = slice(0, 3) if rank == 0 else slice(3, 5)
    assert torch.equal(model.down_proj.to_local(), whole.down_proj[mine])
    x, index, weights = torch.randn(6, 40), torch.tensor([[0, 4], [5, 3]] * 3), torch.rand(6, 2)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [one(given, index, weights) for one, given in zip((whole, model), inputs, strict=True)]
    assert torch.equal(*outputs)
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def run(rank: int, port: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
        for index in range(len(FORMATS)):
            whole, model = build(index), build(index)
            fully_shard(model[2], mesh=mesh)
            fully_shard(model, mesh=mesh)
            weight = model[0].weight
            assert weight.dtype == torch.uint8 and not weight.requires_grad
            assert weight.shape == whole[0].weight.shape
            local = weight.to_local()
            panels = [3, 2][rank]  # 70 columns are 5 panels
            assert local.shape == (panels, whole[0].weight.shape[1]), local.shape
            assert torch.equal(local, whole[0].weight[3 * rank : 3 * rank + panels])

            x = torch.randn(4, 100, generator=torch.Generator().manual_seed(7))
            inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
            outputs = [whole(inputs[0]), model(inputs[1])]
            assert torch.equal(*outputs)
            for y in outputs:
                y.square().sum().backward()
            assert torch.equal(inputs[0].grad, inputs[1].grad)
            # each rank has the same batch, so the mean over ranks is the whole model's gradient
            torch.testing.assert_close(model[2][0].bias.grad.full_tensor(), whole[2][0].bias.grad)

            full = model[0].weight.full_tensor()
            assert torch.equal(full, whole[0].weight)
            with torch.no_grad():
                assert torch.equal(model(x), whole(x))
        check_experts(rank, mesh)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # past torch's own threads, which abort 1 of 10 ranks at exit, without lowbit too


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch's FSDP2 wants a gradient of every parameter, which no integer can have")
def test_packed_weights_shard_on_dim_0_over_two_ranks_with_equal_results_and_gradients():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, args=(port,), nprocs=RANKS, join=True)
