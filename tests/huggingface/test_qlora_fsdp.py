# SPDX-License-Identifier: Apache-2.0
"""QLoRA under FSDP2 on two gloo ranks: packed base and adapters shard, and a run resumed from
torch.distributed.checkpoint is the uninterrupted one, bit for bit."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")
from qlora import NF4, adapted, data, same  # noqa: E402

import lowbit  # noqa: E402
from lowbit import optim  # noqa: E402

RANKS = 2
INT4 = lowbit.int4_weight_only(group_size=32)


def offloaded(params: Any, **options: Any) -> optim.CPUOffloadOptimizer:
    """Shards on the CPU, so this is AdamW8bit itself."""
    return optim.CPUOffloadOptimizer(params, optim.AdamW8bit, **options)


class Run:
    """A sharded model with its optimizer and schedule."""

    def __init__(
        self, config: Any, make: Callable[..., torch.optim.Optimizer], seed: int = 0, mesh: Any = None, rank: int = 8
    ) -> None:
        from torch.distributed.fsdp import fully_shard

        self.model = adapted(config, rank, seed).train()
        for layer in self.model.base_model.model.model.layers if mesh is not None else ():
            fully_shard(layer, mesh=mesh)
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = make(self.model.parameters(), lr=1e-2, min_8bit_size=1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 8)

    def train(self, steps: int) -> None:
        """Take steps, each on texts that the generator chooses, with dropout of adapters that it chooses."""
        texts = data()
        for _ in range(steps):
            chosen = [texts[i]["input_ids"] for i in torch.randint(len(texts), (4,)).tolist()]
            ids = torch.stack(chosen)
            self.model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def local(self) -> dict[str, Any]:
        """Everything that this rank holds of the run."""
        from torch.distributed.tensor import DTensor

        def here(tensor: Any) -> Any:
            return tensor.to_local().detach().clone() if isinstance(tensor, DTensor) else tensor

        named = {name: here(p) for name, p in self.model.named_parameters()}
        states = self.optimizer.state_dict()["state"].items()
        return {
            "parameters": named,
            "states": {str(i): {name: here(value) for name, value in state.items()} for i, state in states},
            "schedule": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def saved(self, adapters_alone: bool) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(ignore_frozen_params=adapters_alone)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load(self, state_dict: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"],
            options=StateDictOptions(strict=False),
        )  # fmt: skip
        self.scheduler.load_state_dict(state_dict["schedule"])
        torch.set_rng_state(state_dict["rng"])


def resume(rank: int, port: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
        cases = [
            (NF4, optim.AdamW8bit, False),
            (NF4, optim.AdamW4bit, True),
            (INT4, optim.Lion8bit, True),
            (INT4, offloaded, False),
        ]
        for number, (config, make, adapters_alone) in enumerate(cases):
            torch.manual_seed(3)
            run = Run(config, make, mesh=mesh)
            layers = [module for module in run.model.modules() if isinstance(module, lowbit.QuantLinear)]
            assert layers and all(
                isinstance(layer.weight, DTensor) and not layer.weight.requires_grad for layer in layers
            )
            base = run.local()["parameters"]
            run.train(3)
            path = str(Path(folder) / str(number))
            dcp.save(run.saved(adapters_alone), checkpoint_id=path)
            run.train(3)

            torch.manual_seed(99)
            resumed = Run(config, make, seed=5, mesh=mesh)  # other adapters
            state_dict = resumed.saved(adapters_alone)
            dcp.load(state_dict, checkpoint_id=path)
            resumed.load(state_dict)
            resumed.train(3)
            ended = run.local()
            assert same(ended, resumed.local())
            changed = {name for name, p in ended["parameters"].items() if not torch.equal(p, base[name])}
            assert changed == {name for name, p in run.model.named_parameters() if p.requires_grad}

        # each rank sees the same texts and dropout, so the sharded run is that of the whole model, up to
        # blocks of states
        torch.manual_seed(3)
        run = Run(NF4, optim.AdamW, mesh=mesh)
        run.train(3)
        torch.manual_seed(3)
        whole = Run(NF4, optim.AdamW)
        whole.train(3)
        for p, q in zip(run.model.parameters(), whole.model.parameters(), strict=True):
            full = p.full_tensor() if isinstance(p, DTensor) else p
            torch.testing.assert_close(full, q, rtol=1e-3, atol=1e-3)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # past torch's own threads, which abort 1 of 10 ranks at exit, without lowbit too


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The first moments of this rank's shards as floats."""
    from lowbit.optim import sharding
    from lowbit.optim.state_format import decode

    return [
        decode(*sharding.local_moment(state["exp_avg"], state["exp_avg_scale"], layout), layout, True)
        for state, layout in ((optimizer.state[param], layout) for param, layout in optimizer._layouts.items())
    ]


def load_into_others(rank: int, port: int, folder: str) -> None:
    """A run of another size is refused by name, and nothing of it is loaded. States of another format are converted."""
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
        torch.manual_seed(3)
        run = Run(NF4, optim.AdamW8bit, mesh=mesh)
        run.train(1)
        dcp.save(run.saved(False), checkpoint_id=folder)
        weight, state = (
            r"layers\.0\.\w+\.\w+\.base_layer\.weight",
            r"optimizer\.state\.\S+\.lora_A\.default\.weight\.exp_avg",
        )
        for config, make, rank_of_adapters, said in (
            (lowbit.int8_weight_only(), optim.AdamW8bit, 8, rf"(?s)Size mismatch.*{weight}"),
            (INT4, optim.AdamW8bit, 8, rf"(?s)Size mismatch.*{weight}"),
            (NF4, optim.AdamW4bit, 8, rf"(?s)Size mismatch.*{state}"),
            (NF4, optim.AdamW8bit, 4, r"(?s)Size mismatch.*lora_A\.default\.weight"),
        ):
            other = Run(config, make, seed=5, mesh=mesh, rank=rank_of_adapters)
            before, state_dict = other.local(), other.saved(False)
            with pytest.raises(dcp.api.CheckpointException, match=said):
                dcp.load(state_dict, checkpoint_id=folder)
            assert same(before, other.local())

        other = Run(NF4, optim.AdamWFp8, seed=5, mesh=mesh)
        state_dict = other.saved(False)
        dcp.load(state_dict, checkpoint_id=folder)
        other.load(state_dict)
        assert other.optimizer.param_groups[0]["state_format"] == "float8"
        for ours, saved in zip(moments(other.optimizer), moments(run.optimizer), strict=True):
            torch.testing.assert_close(ours, saved, rtol=2**-4, atol=2**-9 * float(saved.abs().max()))

        other = Run(NF4, optim.Lion8bit, seed=5, mesh=mesh)  # has a part of the states of AdamW, by the same names
        state_dict = other.saved(False)
        dcp.load(state_dict, checkpoint_id=folder)
        with pytest.raises(
            ValueError, match=r"Lion8bit.load_state_dict: param group 0: Invalid rule value: 'adamw', must be 'lion'"
        ):
            other.load(state_dict)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="this torch's FSDP2 wants a gradient of every parameter, which no integer can have",
)
def test_a_sharded_run_resumes_bit_for_bit_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    mp.spawn(resume, args=(free_port(), str(tmp_path / "resumed")), nprocs=RANKS, join=True)
    mp.spawn(load_into_others, args=(free_port(), str(tmp_path / "others")), nprocs=RANKS, join=True)
