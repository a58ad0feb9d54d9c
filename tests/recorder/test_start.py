# SPDX-License-Identifier: Apache-2.0
"""The recorder is off until the environment or a function asks for it: what there is of it then, and what asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.recorder.processes import CALL, child, surroundings

import lowbit
from lowbit import recorder
from lowbit.recorder.ring import read_ring

TRACES = """
import ctypes, json, os, signal, torch
threads = len(os.listdir("/proc/self/task"))
import lowbit
{first}
layer = torch.nn.Linear(64, 32)
lowbit.quantize_(layer, lowbit.int8_weight_only())
layer(torch.ones(2, 64))
with lowbit.profile() as profile:
    layer(torch.ones(2, 64))
with open("/proc/self/status") as status:
    caught = int(next(line for line in status if line.startswith("SigCgt")).split()[1], 16)
with open("/proc/self/maps") as maps:
    mapped = maps.read()
library = next(line.split()[-1] for line in mapped.splitlines() if "liblowbit" in line)
print(json.dumps({{
    "on": lowbit.info()["recorder"],
    "switch": ctypes.c_int.in_dll(ctypes.CDLL(library), "_ZN6lowbit8recorder5wantsE").value,
    "files": sum(len(files) for _, _, files in os.walk(os.environ["XDG_RUNTIME_DIR"])),
    "folder": os.path.exists(os.environ["XDG_RUNTIME_DIR"] + "/lowbit"),
    "mapped": ".ring" in mapped,
    "threads": len(os.listdir("/proc/self/task")) - threads,
    "handler": bool(caught >> signal.SIGUSR1 - 1 & 1),
    "collectives": torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "AutogradCPU"),
    "profiled": len(profile.records),
}}))
"""


def traces(folder: Path, first: str = "", **environment: str) -> dict[str, object]:
    """Run one of two ranks that calls an op, with a default folder of its own; return what there is of a recorder."""
    chosen = surroundings(WORLD_SIZE="2", RANK="0", OMP_NUM_THREADS="1", XDG_RUNTIME_DIR=str(folder), **environment)
    done = subprocess.run(
        [sys.executable, "-c", TRACES.format(first=first)], env=chosen, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "environment", ({}, {"LOWBIT_RECORD": ""}, {"LOWBIT_RECORD": "0", "LOWBIT_RECORD_TIMEOUT": "100"})
)
def test_nobody_who_has_not_asked_has_a_recorder(tmp_path: Path, environment: dict[str, str]) -> None:
    """The switch that a call reads is 0; no file, folder, mapping, thread, signal handler or kernel of c10d; and a
    profile has no need of it."""
    found = traces(tmp_path, **environment)
    assert found.pop("on") == "off (LOWBIT_RECORD=1 turns it on)" and found.pop("profiled") == 1
    assert found == {
        "switch": 0, "files": 0, "folder": False, "mapped": False, "threads": 0, "handler": False, "collectives": False
    }  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "by, is_watched",
    [
        ("LOWBIT_RECORD", False),
        ("start", False),
        ("LOWBIT_RECORD_TIMEOUT", True),
        ("watch", True),
        ("record_collectives", False),
    ],
)
def test_who_asks_has_all_of_it(tmp_path: Path, by: str, is_watched: bool) -> None:
    """In the environment, where a timeout alone is enough, or by a call."""
    environment = {by: "1" if by == "LOWBIT_RECORD" else "100"} if by.startswith("LOWBIT") else {}
    found = traces(tmp_path, first="" if environment else f"lowbit.recorder.{by}()", **environment)
    assert str(found.pop("on")).startswith(f"{tmp_path}/lowbit/lowbit-") and found.pop("profiled") == 1
    assert found == {
        "switch": 1, "files": 1, "folder": True, "mapped": True, "threads": int(is_watched), "handler": is_watched,
        "collectives": True,
    }  # fmt: skip


def test_reading_what_was_not_recorded_says_how_to_turn_it_on(tmp_path: Path) -> None:
    for call in ("records()", "dump('a.dump')"):
        said = child(f"import lowbit.recorder; lowbit.recorder.{call}", tmp_path, LOWBIT_RECORD="")
        how = "the recorder is off; LOWBIT_RECORD=1 in the environment or lowbit.recorder.start() turns it on"
        assert f"RuntimeError: {call.partition('(')[0]}: {how}" in said.stderr
    said = subprocess.run(
        [sys.executable, "-m", "lowbit", "recorder"], env=surroundings(XDG_RUNTIME_DIR=str(tmp_path)), text=True,
        capture_output=True,
    )  # fmt: skip
    assert said.returncode == 1 and "nothing was recorded (LOWBIT_RECORD=1 turns the recorder on)" in said.stderr


def test_start_takes_records_and_a_folder_and_children_have_both(tmp_path: Path) -> None:
    code = f"""
import lowbit.recorder as recorder
{CALL}
recorder.start(records=40, folder="made/here"[5:])
assert recorder.path().startswith({str(tmp_path)!r} + "/here/lowbit-"), recorder.path()
recorder.start(), recorder.start(records=64), recorder.start(folder="here")
{CALL}
assert len(recorder.records()) == 1
import os
child = os.fork()
if child == 0:
    {CALL * 2}
    os._exit(len(recorder.records()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
os._exit(0)
"""
    said = child(f"import os; os.chdir({str(tmp_path)!r})\n{code}", tmp_path / "unused", LOWBIT_RECORD="0")
    assert said.returncode == 0, said.stderr
    found = [read_ring(path) for path in (tmp_path / "here").glob("*.ring")]
    assert sorted(recording.calls for recording in found) == [1, 2]
    assert {recording.capacity for recording in found} == {64} and not (tmp_path / "unused").exists()


def test_start_refuses_what_it_cannot_do_and_changes_nothing(tmp_path: Path) -> None:
    for records in (0, -1, 1048577):
        with pytest.raises(ValueError, match=f"start: records must be 1 to 1048576, got {records}"):
            recorder.start(records=records)
    for other in ({"records": 1048576}, {"folder": tmp_path / "other"}):
        with pytest.raises(RuntimeError, match=r"start: the recorder is on already, for \d+ records in .*; got other"):
            recorder.start(**other)
    assert not list(tmp_path.iterdir())
    code = f"""
import lowbit.recorder as recorder
for call in (recorder.start, recorder.watch):
    try: call()
    except RuntimeError as error: print(error)
{CALL}
print(_C.recorder.state()["on"], _C.recorder.state()["watched"])
recorder.start(folder={str(tmp_path)!r})
print(recorder.path())
"""
    said = child(code, "/proc/lowbit", LOWBIT_RECORD="0")
    *refused, state, path = said.stdout.splitlines()
    assert len(refused) == 2 and all("cannot make /proc/lowbit" in line for line in refused), said
    assert state == "False False" and path.startswith(f"{tmp_path}/lowbit-") and not said.stderr


def test_a_folder_alone_does_not_ask(tmp_path: Path) -> None:
    said = child(CALL + "print(_C.recorder.state()['on'])", tmp_path, LOWBIT_RECORD="")
    assert said.stdout == "False\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("variable, wanted", [
    ("LOWBIT_RECORD", "0 (off), 1 (on) or a number of records up to 1048576"),
    ("LOWBIT_RECORD_TIMEOUT", "0 to 1e9 seconds"),
])  # fmt: skip
def test_a_variable_that_cannot_be_read_is_named_and_counts_as_not_set(
    tmp_path: Path, variable: str, wanted: str
) -> None:
    for value in ("many", "-1", "1.5e9", "nan"):
        said = child(CALL + "print(_C.recorder.state()['on'])", tmp_path, **{"LOWBIT_RECORD": "", variable: value})
        assert said.stdout == "False\n", said
        assert said.stderr == f"lowbit recorder: {variable} must be {wanted}, got '{value}'; it counts as not set\n"


def test_info_says_which_file_it_is() -> None:
    assert lowbit.info()["recorder"] == recorder.path() and os.path.exists(recorder.path())
