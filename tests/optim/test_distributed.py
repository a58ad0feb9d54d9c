# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on two gloo ranks: a step works on local shards, and a distributed checkpoint continues bit for bit."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lowbit import optim

RANKS = 2


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 97), nn.ReLU(), nn.Linear(97, 128), nn.Linear(128, 5))  # 97 and 5 rows: uneven shards


def with_master(params: Iterator[nn.Parameter], lr: float) -> optim.AdamW8bit:
    """For bfloat16 parameters, as `run` makes them for this function."""
    return optim.AdamW8bit(params, lr=lr, master="bf16+8")


# blocks do not cross shards, so codes differ from those of the whole tensor: relative distance after three steps (twins.py)
DRIFT = {optim.AdamW: 1e-5, optim.AdamW8bit: 0.02, optim.AdamW4bit: 0.3, optim.Lion8bit: 0.15, with_master: 0.02}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def run(rank: int, port: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
        for make, drift in DRIFT.items():
            dtype = torch.bfloat16 if make is with_master else torch.float32
            model, whole = build().to(dtype), build().to(dtype)
            fully_shard(model, mesh=mesh)
            optimizer, single = make(model.parameters(), lr=0.01), make(whole.parameters(), lr=0.01)
            for seed in range(3):
                step(model, optimizer, seed)
                step(whole, single, seed)
            for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                assert isinstance(optimizer.state[p]["exp_avg"], DTensor)
            for p, q, start in zip(model.parameters(), whole.parameters(), build().to(dtype).parameters(), strict=True):
                assert (p.full_tensor() - q).norm() <= drift * (q - start).norm()

            path = str(Path(folder) / make.__name__)
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
            resumed = build().to(dtype)
            fully_shard(resumed, mesh=mesh)
            with torch.no_grad():
                for p, q in zip(resumed.parameters(), model.parameters(), strict=True):
                    p.copy_(q)
            other = make(resumed.parameters(), lr=0.5)
            state_dict = {"optimizer": get_optimizer_state_dict(resumed, other)}
            dcp.load(state_dict, checkpoint_id=path)
            set_optimizer_state_dict(resumed, other, state_dict["optimizer"])
            step(model, optimizer, 9)
            step(resumed, other, 9)
            for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
                assert torch.equal(p.to_local(), q.to_local())
                assert torch.equal(optimizer.float32_values(p).to_local(), other.float32_values(q).to_local())
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # past torch's own threads, which abort 1 of 10 ranks at exit, without lowbit too


def load_alone(rank: int, port: int, folder: str) -> None:
    """One rank cannot resume what two saved, as their blocks end at the shards: the load names the state, and changes nothing."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for make in (optim.AdamW8bit, optim.AdamW4bit):
            model = build()
            fully_shard(model, mesh=mesh)
            optimizer = make(model.parameters(), lr=0.01)
            step(model, optimizer, 0)
            state_dict = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            before = [state["exp_avg"].to_local().clone() for state in optimizer.state.values()]
            with pytest.raises(dcp.api.CheckpointException, match=r"(?s)Size mismatch.*exp_avg"):
                dcp.load(state_dict, checkpoint_id=str(Path(folder) / make.__name__))
            for state, old in zip(optimizer.state.values(), before, strict=True):
                assert torch.equal(state["exp_avg"].to_local(), old)
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_two_ranks_step_their_shards_and_resume_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    mp.spawn(run, args=(free_port(), str(tmp_path)), nprocs=RANKS, join=True)
    mp.spawn(load_alone, args=(free_port(), str(tmp_path)), nprocs=1, join=True)
