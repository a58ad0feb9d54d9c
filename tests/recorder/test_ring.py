# SPDX-License-Identifier: Apache-2.0
"""The ring of a process: what a call leaves, threads, forks, how files come and go, and what goes wrong."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.recorder.processes import CALL, child, surroundings

import lowbit
from lowbit import _C, recorder
from lowbit.recorder.analysis import analyse
from lowbit.recorder.folder import read_folder
from lowbit.recorder.ring import Recording, Sizes, read_ring

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARY = Path(_C.__file__).with_name("liblowbit.so")


def rings(folder: Path) -> list[Recording]:
    return [read_ring(path) for path in sorted(folder.glob("*.ring"))]


def test_a_call_is_recorded_with_row_sizes_and_bytes() -> None:
    layer = torch.nn.Linear(96, 40)
    lowbit.quantize_(layer, lowbit.int8_dynamic_activation_int4_weight(group_size=32))
    with torch.inference_mode():  # a bias that wants a gradient is added outside of the op
        layer(torch.ones(3, 96))
    record = recorder.records()[-1]
    assert (record.op, record.row, record.state) == ("linear", _C.last_kernel("linear"), "finished")
    packed = tuple(layer.weight.shape)
    assert record.tensors == (Sizes("float32", (3, 96), 2), Sizes("uint8", packed, 2), Sizes("float32", (3, 40), 2))
    assert record.read == 4 * 3 * 96 + layer.weight.numel() + 4 * 40 and record.written == 4 * 3 * 40
    assert record.operations == 2 * 3 * 96 * 40 and record.arithmetic == "int8"
    assert record.device == "cpu" and record.depth == 0 and 0 < record.seconds < 60
    assert "linear_int4_int8" in repr(recorder.records()) and "<td" in recorder.records()._repr_html_()


def test_a_row_that_throws_is_failed_and_the_exception_goes_on() -> None:
    bias, q = torch.zeros(4), torch.randn(1, 1, 64, 16)
    with pytest.raises(IndexError):
        lowbit.flex_attention(q, q, q, lambda score, b, h, i, k: score + bias[i])
    record = recorder.records()[-1]
    assert (record.op, record.state) == ("attention_forward", "failed") and record.end_ns > record.start_ns


def test_an_op_of_each_kind_says_what_it_reads_and_writes() -> None:
    q, k = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 100, 32)
    lowbit.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    record = recorder.records()[-1]
    assert record.operations == 2 * 2 * 4 * 100 * 64 and record.read >= 4 * (q.numel() + 2 * k.numel())
    long = torch.randn(1, 1, 50, 16, requires_grad=True)
    lowbit.scaled_dot_product_attention(long, long, long, is_causal=True).sum().backward()
    forward, backward = [record for record in recorder.records() if record.op.startswith("attention")][-2:]
    pairs = 50 * 51 // 2
    assert forward.operations == 2 * pairs * 32 and backward.operations == 2 * pairs * 5 * 16
    parameter = torch.nn.Parameter(torch.ones(8192))
    parameter.grad = torch.ones(8192)
    lowbit.optim.AdamW8bit([parameter]).step()
    step = recorder.records()[-1]
    assert step.op == "optim_step" and step.tensors == (Sizes("float32", (1, 8192), 2),)
    assert step.written == 4 * 8192 + 2 * (8192 + 4 * 32) and step.read == step.written + 4 * 8192


def test_no_record_of_a_million_from_four_threads_is_lost(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the program is C++ and is compiled by this test")
    flags = ["-std=c++20", "-O1", "-w", f"-I{ROOT / 'csrc'}", HERE / "dispatches.cpp", LIBRARY, "-pthread"]
    program = tmp_path / "dispatches"
    subprocess.run([compiler, *flags, f"-Wl,-rpath,{LIBRARY.parent}", "-o", program], check=True)
    environment = surroundings(LOWBIT_RECORD="1", LOWBIT_RECORD_DIR=str(tmp_path))
    done = subprocess.run([program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    told = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert told["calls"] == 1_000_001 and told["started"] == 1 and told["lost"] == 0
    assert 2048 - 64 <= told["kept"] <= 2048, "places that two threads passed by at once"
    assert not list(tmp_path.glob("*.ring")), "all calls had ended"


def test_a_normal_end_removes_the_file_and_any_other_leaves_it(tmp_path: Path) -> None:
    said = child(CALL + "import os; print(os.listdir(os.environ['LOWBIT_RECORD_DIR']))", tmp_path)
    assert ".ring" in said.stdout and not list(tmp_path.iterdir()), said.stderr
    child(CALL + "import os; os.kill(os.getpid(), 9)", tmp_path)
    child("from lowbit import _C; h = _C.recorder.open_call('a', 'b', [('int8', [2, 3])], 6, -1)", tmp_path)
    child(CALL + "h = _C.recorder.open_call('c', 'd', [], 0, -1); _C.recorder.close_call(h, False)", tmp_path)
    found = {recording.records[-1].op: recording for recording in rings(tmp_path)}
    assert sorted(found) == ["a", "all_finite", "c"] and not any(of.is_alive for of in found.values())
    assert found["all_finite"].records[0].tensors == (Sizes("float32", (3,), 1),)
    assert found["a"].records[0].state == "started" and found["c"].records[-1].state == "failed"
    assert found["c"].command_line[0].endswith(Path(sys.executable).name)
    assert not list(tmp_path.glob("*.dump"))


def test_ranks_and_how_many_records_come_from_the_environment(tmp_path: Path) -> None:
    code = CALL * 40 + "import os; os._exit(0)"
    child(code, tmp_path, RANK="3", WORLD_SIZE="8", LOWBIT_RECORD="20")
    (found,) = rings(tmp_path)
    assert (found.rank, found.world, found.capacity, found.calls, found.overwritten) == (3, 8, 32, 40, 8)
    assert [record.sequence for record in found.records] == list(range(8, 40))


def test_a_forked_child_has_a_file_of_its_own(tmp_path: Path) -> None:
    code = f"""
{CALL}
import os, sys
parent = _C.recorder.state()["path"]
child = os.fork()
if child == 0:
    assert _C.recorder.state()["path"] == ""
    for _ in range(3): _C.all_finite(numpy.ones(3, numpy.float32))
    assert _C.recorder.state()["path"] != parent
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""
    said = child(code, tmp_path, RANK="1", WORLD_SIZE="2")
    assert said.returncode == 0, said.stderr
    one, three = sorted(rings(tmp_path), key=lambda recording: recording.calls)
    assert (one.calls, one.rank, three.calls, three.rank) == (1, 1, 3, -1)
    assert one.pid != three.pid and three.records[0].thread == three.pid


def test_a_child_that_is_forked_while_a_thread_makes_the_file_makes_its_own(tmp_path: Path) -> None:
    """In children that have no file yet, of a process that has imported all that a call needs. A child that waits for a
    thread of its parent is ended by its alarm."""
    code = """
import os, signal, threading, time, numpy
from lowbit import _C
def call():
    _C.all_finite(numpy.ones(3, numpy.float32))
def in_child(function):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        function()
        os._exit(0)
    return os.waitpid(child, 0)[1]
def first_call(delay):
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(delay)
    status = in_child(call)
    thread.join()
    os._exit(status != 0)
call()
print([in_child(lambda: first_call(number * 2e-5)) for number in range(40)])
"""
    said = child(code, tmp_path, LOWBIT_RECORD="8192")
    assert said.stdout == f"{[0] * 40}\n", said
    assert len(rings(tmp_path)) >= 40


@pytest.mark.parametrize("folder", ["/proc/lowbit", "/dev/null/lowbit", "a file"])
def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, folder: str) -> None:
    if folder == "a file":
        folder = str(tmp_path / "file")
        Path(folder).write_text("")
    code = CALL * 2 + (
        "state = _C.recorder.state(); assert not state['path'] and state['reason'];"
        "from lowbit.recorder.ring import parse; assert len(parse(_C.recorder.snapshot()).records) == 2;"
        f"_C.recorder.dump({str(tmp_path / 'a.dump')!r}, '')"
    )
    said = child(code, folder)
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("\n") == 1 and "lowbit recorder: cannot " in said.stderr and folder in said.stderr
    assert len(read_ring(tmp_path / "a.dump").records) == 2


def test_a_full_disk_is_said_once_and_the_program_goes_on(tmp_path: Path) -> None:
    """A limit on the size of files, which a disk without room looks like to the process."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100000, {resource.RLIM_INFINITY}));"
    said = child(limit + CALL * 2, tmp_path)
    assert said.returncode == 0 and "no room for 528384 bytes in" in said.stderr and said.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
    dumped = child(limit + CALL * 700 + f"_C.recorder.dump({str(tmp_path / 'a.dump')!r}, '')", tmp_path, LOWBIT_RECORD="1024")
    assert dumped.returncode == 1 and "RuntimeError: dump: cannot write" in dumped.stderr


def test_the_folder_of_nobody_s_choice_is_private_and_is_cleaned(tmp_path: Path) -> None:
    runtime = tmp_path / "lowbit"
    runtime.mkdir(mode=0o755)
    said = child(CALL, "", XDG_RUNTIME_DIR=str(tmp_path))
    assert "must belong to this user alone (mode 0700)" in said.stderr and not list(runtime.iterdir())
    runtime.chmod(0o700)
    for number in range(70):
        (runtime / f"lowbit-host-{number}.ring").write_bytes(b"")
        os.utime(runtime / f"lowbit-host-{number}.ring", (time.time() - number,) * 2)
    os.utime(runtime / "lowbit-host-0.ring", (0, 0))
    (runtime / "notes.txt").write_text("somebody's")
    os.utime(runtime / "notes.txt", (0, 0))
    said = child(CALL, "", XDG_RUNTIME_DIR=str(tmp_path))
    kept = {path.name for path in runtime.iterdir()}
    assert said.returncode == 0 and not said.stderr
    assert kept == {"notes.txt"} | {f"lowbit-host-{number}.ring" for number in range(1, 65)}


HANG = """
import torch, lowbit, os, signal, sys, threading
signal.signal(signal.SIGUSR1, lambda *_: None)
x, layer = torch.ones(4096, 1024), torch.nn.Linear(1024, 4096, bias=False)
lowbit.quantize_(layer, lowbit.float_weight())
def cheap():
    while True: lowbit.recorder._C.all_finite(x[:1])
lowbit.recorder.watch(0.3)
print("ready", flush=True)
threading.Thread(target=cheap, daemon=True).start()
with lowbit.force_kernel("linear_float32_scalar"), torch.inference_mode():
    layer(x)
"""


def test_an_op_that_hangs_is_dumped_by_timeout_and_signal_and_survives_a_kill(tmp_path: Path) -> None:
    """While another thread makes so many calls that the ring went round many times."""
    environment = surroundings(LOWBIT_RECORD="64", LOWBIT_RECORD_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    program = subprocess.Popen(
        [sys.executable, "-c", HANG], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        line = program.stderr.readline()
        assert "lowbit recorder: linear (linear_float32_scalar), call " in line and line.count("written to ") == 1
        assert " runs for 0." in line or " runs for 1." in line
        program.send_signal(signal.SIGUSR1)
        asked = program.stderr.readline()
        assert asked.startswith("lowbit recorder: asked by a signal, linear (linear_float32_scalar), call ")
        alive = analyse(read_folder(tmp_path))
        assert any(state.is_alive and state.unfinished and state.unfinished.op == "linear" for state in alive.ranks)
        (live,) = [read_ring(path) for path in tmp_path.glob("*.ring")]
        for _ in range(600):
            if live.calls >= 1000:
                break
            time.sleep(0.05)
            (live,) = [read_ring(path) for path in tmp_path.glob("*.ring")]
    finally:
        program.kill()
        program.wait()
    dumps = sorted(tmp_path.glob("*-[12].dump"))
    assert len(dumps) == 2 and read_ring(dumps[1]).reason.startswith("asked by a signal")
    for path in dumps:
        path.unlink()
    after = analyse(read_folder(tmp_path))
    assert " is in #" in after.verdict and " linear (linear_float32_scalar) float32 [4096, 1024]" in after.verdict
    # the age ends at the last recorded call, which on a loaded machine may be earlier than the dump
    assert after.verdict.endswith("and gone") and after.ranks[0].overwritten > 500 and after.ranks[0].age_s > 0


@pytest.mark.parametrize("seconds", (-1.0, float("nan"), 2e9))
def test_watch_refuses_what_is_no_timeout(seconds: float) -> None:
    with pytest.raises(ValueError, match="watch: timeout must be 0 to 1e9 seconds"):
        recorder.watch(seconds)


def test_dump_writes_what_the_ring_has(tmp_path: Path) -> None:
    made = recorder.dump(tmp_path / "now.dump", reason='a "reason"\n')
    (dumped,) = read_folder(tmp_path).recordings
    assert dumped.path == made and dumped.reason == 'a "reason"\n'
    ours = recorder.records()
    assert list(dumped.records) == list(ours) and dumped.pid == os.getpid() and dumped.is_alive
    with pytest.raises(RuntimeError, match="dump: cannot write /proc/none/now.dump"):
        recorder.dump("/proc/none/now.dump")
