# SPDX-License-Identifier: Apache-2.0
"""The analysis of recordings that are made up: ranks that differ, are missing or hang; and of bad files."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from wrong_types import variants

from lowbit import _C
from lowbit.__main__ import main
from lowbit.recorder.analysis import Analysis, analyse
from lowbit.recorder.folder import Folder, read_folder
from lowbit.recorder.report import report, text
from lowbit.recorder.ring import Record, Recording, Sizes, parse
from lowbit.recorder.torch_dumps import from_torch

SECOND = 10**9


def call(sequence: int, op: str = "linear", shape: tuple[int, ...] = (2, 64), **changes: object) -> Record:
    number, row = -1, f"{op}_row"
    if op.startswith("c10d."):
        number, row = sequence, "gloo:0 default_pg"
    record = Record(
        sequence, op, row, "finished", "cpu", 0, 7, 0, sequence * SECOND, sequence * SECOND + 1000, "float", 8, 8, 16,
        number, (Sizes("float32", shape, len(shape)),),
    )  # fmt: skip
    return replace(record, **changes)


def started(record: Record) -> Record:
    return replace(record, state="started", end_ns=0)


def rank(number: int, *records: Record, world: int = 2, alive: bool = True) -> Recording:
    taken = 100 * SECOND if alive else 0
    return Recording(
        f"lowbit-{number}.ring", "host", 100 + number, number, world, 0, 0, taken, (), 2048, len(records), 0, 0, records
    )


def findings(*recordings: Recording) -> Analysis:
    return analyse(Folder("made up", recordings, ()))


def test_ranks_that_agree_blame_nobody() -> None:
    found = findings(*(rank(i, call(0), call(1, "c10d.all_reduce"), call(2)) for i in range(2)))
    assert found.culprits == () and found.call is None and found.collective is None
    assert found.verdict == "every recorded call has ended, and ranks agree"


@pytest.mark.parametrize("change", [{"tensors": (Sizes("bfloat16", (2, 64), 2),)}, {"row": "other"}, {"op": "decode"}])
def test_the_minority_of_three_is_blamed(change: dict[str, object]) -> None:
    """Also where it has the lowest rank."""
    found = findings(rank(0, call(0), call(1, **change)), rank(1, call(0), call(1)), rank(2, call(0), call(1)))
    assert found.call is not None and found.call.number == 1 and found.culprits == (0,)
    assert found.call.kind == {"tensors": "dtype"}.get(next(iter(change)), next(iter(change)))


def test_a_collective_of_another_shape_is_the_verdict_before_a_call() -> None:
    found = findings(
        rank(0, call(0), started(call(1, "c10d.all_reduce", (4,)))),
        rank(1, call(0, "decode"), started(call(1, "c10d.all_reduce", (8,)))),
    )
    assert found.call is not None and found.call.kind == "op" and found.call.number == 0
    assert found.collective is not None and found.collective.kind == "shape" and found.culprits == (1,)
    assert found.verdict == "rank 1: another shape than the other ranks in collective of group 0 default_pg, number 1"


def test_an_all_to_all_may_have_other_shapes() -> None:
    found = findings(*(rank(i, call(0, "c10d.all_to_all_single", (i,))) for i in range(2)))
    assert found.collective is None


def test_who_does_not_come_is_blamed_and_what_it_does_is_said() -> None:
    waiting = started(call(2, "c10d.all_reduce"))
    found = findings(rank(0, call(0), call(1), waiting), rank(1, call(0), started(call(1))))
    assert found.culprits == (1,) and "did not come to collective of group 0 default_pg, number 2" in found.verdict
    assert "rank 1 is in #1 linear (linear_row) float32 [2, 64], for 99.0 s" in found.verdict
    found = findings(rank(0, waiting, world=3), rank(1, replace(waiting), world=3))
    assert found.culprits == (2,) and found.verdict.endswith("rank 2 left no recording")
    found = findings(rank(0, call(0), call(1), waiting), rank(1, call(0), alive=False))
    assert found.verdict.endswith("rank 1 is gone, its last call was #0 linear (linear_row) float32 [2, 64]")


def test_a_rank_that_is_behind_is_not_blamed_while_nobody_waits() -> None:
    found = findings(rank(0, call(0, "c10d.all_reduce"), call(1, "c10d.all_reduce")), rank(1, call(0, "c10d.all_reduce")))
    assert found.collective is None and found.culprits == ()


def test_an_op_that_has_not_ended_is_found_without_ranks() -> None:
    alone = replace(rank(-1, call(0), started(call(1))), taken_ns=0)
    found = findings(alone)
    assert found.verdict == "pid 99 is in #1 linear (linear_row) float32 [2, 64], for at least 0.0 s, and gone"
    assert "no rank: pid 99 on host, gone" in text(found)


def test_a_receive_is_unfinished_until_its_thread_goes_on() -> None:
    receive = started(call(1, "c10d.recv", group_sequence=-1))
    assert findings(rank(0, call(0), receive)).ranks[0].unfinished == receive
    found = findings(rank(0, call(0), receive, call(2)), rank(1, call(0), call(1, "c10d.send", group_sequence=-1), call(2)))
    assert found.ranks[0].unfinished is None and found.call is None


def test_records_that_were_overwritten_are_counted_and_not_compared() -> None:
    late = replace(rank(0, call(5), call(6)), calls=7)
    found = findings(late, replace(rank(1, call(6, "decode")), calls=7))
    assert found.ranks[0].overwritten == 5
    assert found.call is not None and found.call.number == 6


def test_of_two_files_of_a_rank_the_one_with_collectives_counts() -> None:
    worker = replace(rank(1, call(50)), pid=900)
    same = [rank(i, call(0, "c10d.all_reduce")) for i in range(2)]
    assert findings(*same, worker).call is None


def test_bad_files_are_named_and_the_others_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    ring = _C.recorder.snapshot()
    (tmp_path / "whole.ring").write_bytes(ring)
    (tmp_path / "cut.ring").write_bytes(ring[:-1000])
    (tmp_path / "head.ring").write_bytes(ring[:100])
    (tmp_path / "empty.ring").write_bytes(b"")
    (tmp_path / "later.ring").write_bytes(ring[:8] + (9).to_bytes(4, "little") + ring[12:])
    (tmp_path / "names.ring").write_bytes(ring[:256] + b"\xff" * 768 + ring[1024:])
    (tmp_path / "name.ring").write_bytes(ring.replace(b'"dtype"', b'"dtypf"', 1))
    (tmp_path / "noise.bin").write_bytes(b"\0\1\2\3 nothing of ours")
    (tmp_path / "cut.json").write_text('{"version": "2.10", "entries": [')
    (tmp_path / "other.json").write_text('{"records": []}')
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"version": "1.0"}))
    (tmp_path / "trace_1").write_bytes(pickle.dumps(Path("/")))
    (tmp_path / "trace_2").write_bytes(pickle.dumps({"version": "2.10", "entries": [{}]}))
    found = read_folder(tmp_path)
    assert [Path(recording.path).name for recording in found.recordings] == ["whole.ring"]
    told = "\n".join(found.problems)
    for name, why in (
        ("cut.ring", "it is cut short"), ("head.ring", "cut short (100 bytes)"), ("empty.ring", "not the file of a"),
        ("later.ring", "the version of the recorder's file must be 1, got 9"), ("names.ring", "damaged"),
        ("name.ring", "damaged: names must be an object with dtype"),
        ("noise.bin", "must be a recording of lowbit or"), ("cut.json", "cut short"), ("other.json", "not a dump of torch"),
        ("trace_0", "version '1.0'"),
        ("trace_1", "asks for pathlib"), ("trace_2", "damaged dump of torch's flight recorder: KeyError"),
    ):  # fmt: skip
        with subtests.test(name):
            assert f"{name}: " in told and why in told.partition(f"{name}: ")[2].partition("\n")[0], (name, told)
    assert len(found.problems) == 12
    assert main(["recorder", str(tmp_path), "--json", str(tmp_path / "out.json")]) == 0
    assert "not read: " in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["problems"] == list(found.problems)


def test_a_value_of_a_wrong_type_is_a_problem_or_shown(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """In the names of a ring and in a dump of torch's."""
    _C.all_finite(__import__("torch").ones(3))
    ring = _C.recorder.snapshot()
    names = json.loads(ring[256:1024].rstrip(b"\0"))
    entry = {
        "record_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "profiling_name": "gloo:all_reduce",
        "time_created_ns": 5, "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "scheduled", "retired": True,
        "is_p2p": False, "thread_id": "7",
    }  # fmt: skip
    trace = {"version": "2.10", "rank": 0, "pg_config": {"": {"name": "", "ranks": "[0, 1]"}}, "entries": [entry]}
    documents = [(what, "a.ring", ring[:256] + json.dumps(of)[:768].encode().ljust(768, b"\0") + ring[1024:]) for what, of in variants(names)]
    documents += [(what, "a.json", json.dumps(of).encode()) for what, of in variants(trace)]
    deep = ("nested", "a.json", b'{"a":' * 100_000)
    refused = 0
    for what, name, content in [*documents, deep]:
        folder = tmp_path / "one"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        (folder / "b.ring").write_bytes(ring)
        found = read_folder(folder)
        with subtests.test(what):
            assert text(analyse(found))
            assert found.recordings[-1].path.endswith("b.ring")
        refused += len(found.problems)
        (folder / name).unlink()
    assert refused > len(documents) // 3


def test_a_folder_without_files_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match="which has no file"):
        report(tmp_path)
    assert main(["recorder", str(tmp_path / "none")]) == 1
    assert "path must be a folder, got" in capsys.readouterr().err


def test_a_record_that_was_being_written_is_left_out_and_counted() -> None:
    _C.all_finite(__import__("torch").ones(3))
    ring = bytearray(_C.recorder.snapshot())
    recording = parse(bytes(ring))
    at = next(at for at in range(4096, len(ring), 256) if ring[at : at + 8] != bytes(8))
    ring[at + 252 : at + 256] = b"\xff" * 4
    torn = parse(bytes(ring))
    assert torn.torn == recording.torn + 1 and len(torn.records) == len(recording.records) - 1
    assert torn.overwritten == recording.overwritten


def test_a_dump_of_torch_whose_groups_have_other_names_is_read() -> None:
    """As gloo of torch 2.13 writes it, on which torchfrtrace dies with a KeyError."""
    entry = {
        "record_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "profiling_name": "gloo:all_reduce",
        "time_created_ns": 5, "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "scheduled", "retired": True,
        "is_p2p": False,
    }  # fmt: skip
    groups = {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}
    recording = from_torch({"version": "2.10", "pg_config": groups, "entries": [entry]}, "trace_rank_1")
    assert (recording.rank, recording.world) == (1, 2)
    assert str(recording.records[0]) == "#0 c10d.all_reduce (gloo:0 default_pg) float32 [4]"
    assert recording.records[0].state == "finished" and recording.records[0].group == "0 default_pg"
    late = {"version": "2.10", "pg_config": groups, "entries": [{**entry, "retired": False}]}
    found = findings(from_torch(late, "trace_rank_0"), from_torch({**late, "entries": []}, "trace_rank_1"))
    assert found.culprits == (1,)
