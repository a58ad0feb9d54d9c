# SPDX-License-Identifier: Apache-2.0
"""Two real ranks of gloo that part ways (ranks.py): the report names the right one, and what it did; its timeline;
torch's own dump of gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.recorder.processes import surroundings

from lowbit import recorder
from lowbit.recorder.analysis import Analysis
from lowbit.recorder.ring import read_ring

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
CASES = ("agree", "shape", "other_op", "missing", "hang", "local_shape")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("ranks.py")
    done = subprocess.run(
        [sys.executable, program, made, *CASES], capture_output=True, text=True, timeout=300,
        env=surroundings(LOWBIT_RECORD="1", OMP_NUM_THREADS="1", WORLD_SIZE="2"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (made / "said").write_text(done.stderr)
    return made


def analysis(folder: Path, case: str) -> Analysis:
    return recorder.report(folder / case).analysis


def test_ranks_that_agree(folder: Path) -> None:
    """Both left by os._exit: a ring and a dump of each."""
    found = analysis(folder, "agree")
    assert len(found.ranks) == 4 and found.culprits == () and found.call is None and found.world == 2
    assert found.verdict == "every recorded call has ended, and ranks agree"
    for path in (folder / "agree").glob("*.dump"):
        ops = [(record.op, record.state) for record in read_ring(path).records]
        two = ("send", "recv")[int(path.stem[-1])]
        last = ("all_reduce", "broadcast", "all_gather", "barrier", "all_reduce", two, "barrier")
        assert [op for op, _ in ops[-7:]] == [f"c10d.{op}" for op in last]
        assert {state for _, state in ops} == {"finished"}


@pytest.mark.parametrize("case, kind", [("shape", "shape"), ("other_op", "op")])
def test_another_collective(folder: Path, case: str, kind: str) -> None:
    found = analysis(folder, case)
    assert found.collective is not None and found.collective.kind == kind and found.collective.number == 1
    assert found.culprits == (1,)
    assert found.verdict == f"rank 1: another {kind} than the other ranks in collective of group 0 default_pg, number 1"


def test_a_rank_that_does_not_come(folder: Path) -> None:
    found = analysis(folder, "missing")
    assert found.collective is not None and found.collective.kind == "missing" and found.culprits == (1,)
    assert "did not come to collective of group 0 default_pg, number 1, where the others wait: rank 1 is gone" in found.verdict


def test_a_rank_that_hangs_in_an_op(folder: Path) -> None:
    found = analysis(folder, "hang")
    assert found.culprits == (1,) and "where the others wait: rank 1 is in #" in found.verdict
    assert " linear (linear_float32_scalar) float32 [4096, 1024]" in found.verdict
    waiting = found.ranks[0].unfinished
    assert waiting is not None and waiting.op == "c10d.all_reduce" and waiting.group_sequence == 1


def test_an_op_of_another_shape(folder: Path) -> None:
    found = analysis(folder, "local_shape")
    assert found.collective is None and found.call is not None
    assert found.call.kind == "shape" and found.culprits == (1,) and found.call.records[1].tensors[0].shape[-1] == 96


def test_the_dumps_of_torch_are_read(folder: Path) -> None:
    """torchfrtrace dies on them: KeyError ('0', 0)."""
    found = analysis(folder, "torch")
    assert [state.rank for state in found.ranks] == [0, 1] and found.culprits == () and not found.problems
    assert found.ranks[0].calls >= 6 and found.ranks[0].last_finished is not None


def test_the_timeline_is_a_trace_of_both_ranks(folder: Path, tmp_path: Path) -> None:
    """In the format of torch.profiler's traces: a process a rank, calls with a start and a length, or without an end."""
    trace = tmp_path / "trace.json"
    states = {state.rank: state for state in recorder.report(folder / "hang", trace_file=str(trace)).analysis.ranks}
    events = json.loads(trace.read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    for pid, name in named.items():
        state = states[int(name.split(",")[0].removeprefix("rank "))]
        calls = [event for event in events if event["pid"] == pid and event["ph"] != "M"]
        assert len(calls) == state.calls and all(event["ts"] >= 0 and {"tid", "name"} <= event.keys() for event in calls)
        (hangs,) = [event for event in calls if event["ph"] == "B"]
        assert hangs["args"]["sequence"] == state.unfinished.sequence and hangs["name"] == state.unfinished.op
        assert all(event["ph"] == "X" and event["dur"] >= 0 for event in calls if event is not hangs)
    assert len(named) == 2 and min(event["ts"] for event in events if event["ph"] != "M") == 0
