# SPDX-License-Identifier: Apache-2.0
"""Two ranks of gloo that part ways, for tests/recorder/test_ranks.py: `python ranks.py FOLDER CASE ...`.

Each case is two forked processes with a folder of its own. torch is imported once."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import lowbit
import lowbit.recorder.collectives
from lowbit import recorder


def op(k: int = 64) -> None:
    layer = torch.nn.Linear(k, 32)
    lowbit.quantize_(layer, lowbit.int8_weight_only())
    layer(torch.ones(2, k))


def agree(rank: int) -> None:
    op()
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(3), 0)
    outputs = [torch.empty(2), torch.empty(2)]
    dist.all_gather(outputs, torch.ones(2))
    dist.barrier()
    work = dist.all_reduce(torch.ones(5), async_op=True)
    work.wait()
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2), 0)
    dist.barrier()
    folder = Path(recorder.path()).parent
    recorder.dump(folder / f"of{rank}.dump")
    from torch._C._distributed_c10d import _dump_fr_trace

    with open(folder.with_name("torch") / f"trace_rank_{rank}", "wb") as file:
        file.write(_dump_fr_trace())


def shape(rank: int) -> None:
    op()
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4 + 4 * rank))


def other_op(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)


def missing(rank: int) -> None:
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.all_reduce(torch.ones(4))


def hang(rank: int) -> None:
    """Rank 1 stays in a row of an op: the scalar row of a product that takes minutes."""
    dist.all_reduce(torch.ones(4))
    if rank == 1:
        endless()
    dist.all_reduce(torch.ones(4))


def endless() -> None:
    x = torch.ones(4096, 1024)
    layer = torch.nn.Linear(1024, 4096, bias=False)
    lowbit.quantize_(layer, lowbit.float_weight())
    with lowbit.force_kernel("linear_float32_scalar"), torch.inference_mode():
        layer(x)


def local_shape(rank: int) -> None:
    """No collective is wrong, and an op is."""
    op(64 + 32 * rank)
    dist.all_reduce(torch.ones(4))


CASES = {case.__name__: case for case in (agree, shape, other_op, missing, hang, local_shape)}


def run(case: str, rank: int, folder: str) -> None:
    recorder.start(folder=os.path.join(folder, case))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{case}.store", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=600 if case == "hang" else 5),
    )  # fmt: skip
    try:
        CASES[case](rank)
    except Exception as error:
        print(f"{case} rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        os._exit(3)


def main() -> None:
    folder, cases = sys.argv[1], sys.argv[2:]
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    assert recorder.collectives._library, "WORLD_SIZE says that there are several processes"
    recorder.record_collectives()
    os.makedirs(os.path.join(folder, "torch"))
    children = []
    for case in cases:
        os.makedirs(os.path.join(folder, case))
        for rank in range(2):
            child = os.fork()
            if child == 0:
                run(case, rank, folder)
                os._exit(0)
            children.append((case, child))
    hanging = [child for case, child in children if case == "hang"]
    try:
        wait_until_inside_of_the_op(os.path.join(folder, "hang"))
    finally:
        for child in hanging:
            os.kill(child, 9)
    for _, child in children:
        os.waitpid(child, 0)


def wait_until_inside_of_the_op(folder: str) -> None:
    states: set[str] = set()
    for _ in range(1200):
        if os.listdir(folder):
            states = {rank.unfinished.op for rank in recorder.report(folder).analysis.ranks if rank.unfinished}
        if states == {"linear", "c10d.all_reduce"}:
            return
        time.sleep(0.1)
    raise TimeoutError(f"hang: not in the op and the collective, but in {states}")


if __name__ == "__main__":
    main()
