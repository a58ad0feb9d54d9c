# SPDX-License-Identifier: Apache-2.0
"""Packed models whose file is mapped: processes share its pages, and a file larger than the memory is loaded and answers.

In processes of their own, whose memory Linux tells in /proc.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from expert_modules import Experts
from torch import nn

import lowbit
from lowbit.quant.mapped_file import mapped_bytes, mapped_tensors
from lowbit.quant.safetensors_file import Entry, bytes_of, write_safetensors

linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's /proc")
EXPERTS, HIDDEN, INNER, TOKENS = 24, 512, 768, 7
SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch, lowbit
from test_mapped_file import Wide, answer, mapped, status

model = torch.nn.Sequential(Wide(int(sys.argv[2])))
before = status()
lowbit.load(model, sys.argv[1])
loaded = status()
y = answer(model, json.loads(sys.argv[3]))
print(json.dumps(dict(before=before, loaded=loaded, used=status(), y=y, ahead=model[0].__dict__.get("reads_ahead", False))), flush=True)
if sys.stdin.readline():
    print(json.dumps(mapped(sys.argv[1])), flush=True)
"""


class Wide(Experts):
    """Experts of which there may be more than memory has room for, on the meta device."""

    def __init__(self, experts: int) -> None:
        nn.Module.__init__(self)
        self.is_transposed, self.is_concatenated, self.act_fn = False, True, nn.SiLU()
        for key, n, k in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            self.register_parameter(key, nn.Parameter(torch.empty(experts, n, k, device="meta")))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            hidden = self._apply_gate(self.product("gate_up_proj", hidden_states[token], expert))
            y.index_add_(0, token, self.product("down_proj", hidden, expert) * top_k_weights[token, place, None])
        return y


def status() -> dict[str, int]:
    """Bytes of this process, by their kind: RssAnon is its own memory, RssFile pages of files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[0][:3] in ("Rss", "VmH")}


def mapped(path: str) -> dict[str, int]:
    """Sums of bytes over the mappings of a file in this process."""
    sums: dict[str, int] = {}
    of_file = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            of_file = line.endswith(f" {path}")
        elif of_file and values[-1:] == ["kB"]:
            sums[key[:-1]] = sums.get(key[:-1], 0) + int(values[0]) * 1024
    return sums


@torch.inference_mode()
def answer(model: nn.Module, picked: list[int]) -> list[float]:
    """A few numbers of the answers of these experts, two to a token in turns, seven tokens to a call."""
    pairs, numbers = [[one, picked[place - 1]] for place, one in enumerate(picked)], []
    for begin in range(0, len(pairs), TOKENS):
        index = torch.tensor(pairs[begin : begin + TOKENS])
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))[: len(index)]
        numbers.append(model[0](x, index, torch.full(index.shape, 0.5))[:, :3].flatten())
    return torch.cat(numbers).tolist()


def packed(experts: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Wide(experts))
    for key, value in [*model[0].named_parameters()]:
        setattr(model[0], key, nn.Parameter(torch.randn(value.shape) * value.shape[-1] ** -0.5))
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(32))
    return model


def saved(model: nn.Module, path: Path) -> Path:
    state = {key: value.detach() for key, value in model.state_dict().items()}
    write_safetensors(path, {key: Entry.of(value) for key, value in state.items()}, ([bytes(bytes_of(one))] for one in state.values()), {})
    return path


def repeated(few: nn.Module, times: int, path: Path) -> Path:
    """A file in which the experts of a model follow one another several times."""
    state = {key: value.detach().clone() for key, value in few.state_dict().items()}
    for key in [key for key in state if key.endswith("_layout")]:
        state[key][-1] *= times
    shapes = {key: (len(value) * times, *value.shape[1:]) if value.dtype == torch.uint8 else value.shape for key, value in state.items()}
    entries = {key: Entry(Entry.of(state[key]).dtype, shape, torch.Size(shape).numel() * state[key].itemsize) for key, shape in shapes.items()}
    chunks = ([bytes(bytes_of(value))] * (times if value.dtype == torch.uint8 else 1) for value in state.values())
    write_safetensors(path, entries, chunks, {})
    return path


def sparse(few: nn.Module, experts: int, places: list[int], path: Path) -> Path:
    """A file of so many experts, of which those at these places are those of a model, and the others are holes of zeros."""
    state = {key: value.detach().clone() for key, value in few.state_dict().items()}
    shapes = {key: (experts, *value.shape[1:]) if value.dtype == torch.uint8 else value.shape for key, value in state.items()}
    for key in shapes:
        if key.endswith("_layout"):
            state[key][-1] = experts
    header, end = {}, 0
    for key, shape in shapes.items():
        size = torch.Size(shape).numel() * state[key].itemsize
        header[key] = {"dtype": Entry.of(state[key]).dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, value in state.items():
            begin = 8 + len(text) + header[key]["data_offsets"][0]
            if value.dtype != torch.uint8:
                file.seek(begin)
                file.write(bytes(bytes_of(value)))
                continue
            for place, matrix in zip(places, value, strict=True):
                file.seek(begin + place * matrix.nbytes)
                file.write(bytes(bytes_of(matrix.contiguous())))
        file.truncate(8 + len(text) + end)
    if path.stat().st_blocks * 512 > end // 2:
        pytest.skip("this file system has no holes in files")
    return path


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the script, which waits for a line after its answer; all are ended behind the test."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, experts: int, picked: list[int], enter: str = "") -> subprocess.Popen[str]:
        given = [sys.executable, "-c", enter + SCRIPT, str(path), str(experts), json.dumps(picked)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(given, text=True, **pipes))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def test_tensors_are_those_of_the_file_and_writing_leaves_it_as_it_is(tmp_path: Path) -> None:
    values = {
        "codes": torch.randint(0, 256, (5, 7), dtype=torch.uint8),
        "odd": torch.randn(3, 2),  # at byte 35, which no float32 has
        "half": torch.randn(4).bfloat16(),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(7),
        "small": torch.randn(6).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "some.safetensors"
    write_safetensors(path, {key: Entry.of(value) for key, value in values.items()}, ([bytes(bytes_of(one))] for one in values.values()), {})
    found = mapped_tensors(path)
    assert found.keys() == values.keys()
    for key, value in values.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key
    assert mapped_bytes([found["codes"], found["codes"], found["small"]]) == 35 + 6
    assert not mapped_bytes([found["odd"], found["empty"], values["codes"]])
    found["codes"].zero_()
    assert torch.equal(mapped_tensors(path)["codes"], values["codes"])


def test_the_pages_are_released_with_the_last_tensor(tmp_path: Path) -> None:
    from lowbit.quant import mapped_file

    before = len(mapped_file._mappings)
    found = mapped_tensors(saved(packed(2), tmp_path / "experts.safetensors"))
    kept = found["0.down_proj"]
    del found
    assert len(mapped_file._mappings) == before + 1 and int(kept.sum()) > 0
    del kept
    assert len(mapped_file._mappings) == before


@linux
def test_two_processes_hold_one_copy(tmp_path: Path, process: Callable[..., subprocess.Popen[str]]) -> None:
    model = packed(EXPERTS)
    path = saved(model, tmp_path / "experts.safetensors")
    size, everyone = path.stat().st_size, [*range(EXPERTS)]
    each = [process(path, EXPERTS, everyone) for _ in range(2)]
    wanted = answer(model, everyone)
    for one in each:
        found = told(one)
        assert found["y"] == wanted
        grown = {key: found["used"][key] - found["before"][key] for key in ("RssAnon", "RssFile")}
        assert grown["RssAnon"] < size / 2, "no copy of the weights in memory of its own"
    for one in each:
        one.stdin.write("\n")
        one.stdin.flush()
    for sums in map(told, each):
        assert sums["Rss"] > 0.9 * size and sums["Private_Dirty"] == 0
        assert sums["Pss"] < 0.6 * sums["Rss"], sums  # a page that two processes have counts half in each


@linux
def test_a_file_larger_than_the_memory_is_loaded_and_answers(tmp_path: Path, process: Callable[..., subprocess.Popen[str]]) -> None:
    """A file of holes, so that it takes no space. A mapping that reserved memory for it would be refused."""
    few = packed(4)
    memory = next(int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    one = sum(value[0].nbytes for value in few.state_dict().values() if value.dtype == torch.uint8)
    experts = 1 + 5 * memory // (4 * one)
    places = [0, experts // 3, experts // 2, experts - 1]
    wanted = answer(few, [0, 1, 2, 3])
    path = sparse(few, experts, places, tmp_path / "experts.safetensors")
    running = process(path, experts, places)
    found = told(running)
    assert found["y"] == wanted and found["ahead"]
    assert found["used"]["VmHWM"] - found["before"]["VmHWM"] < 2e9 < memory
    _, words = running.communicate("")
    assert f"load: {path.stat().st_size / 1e9:.1f} GB of weights are mapped and " in words
    assert "experts as soon as the router has chosen them" in words


def groups() -> Path:
    """The folder of this process's control group of memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        for root, ours in ((Path("/sys/fs/cgroup"), number == "0" and not Path("/sys/fs/cgroup/memory").is_dir()), (Path("/sys/fs/cgroup/memory"), "memory" in controllers)):
            if ours:
                return root / path.lstrip("/") if (root / path.lstrip("/")).is_dir() else root
    pytest.skip("no right to make a control group: the system has none of memory")


@linux
def test_a_process_with_less_memory_than_the_file_answers(tmp_path: Path, process: Callable[..., subprocess.Popen[str]]) -> None:
    """The limit is that of a control group: a process that held all weights would be killed."""
    limit, few, times = 384 << 20, packed(16), 70
    group = groups() / f"lowbit_test_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no right to make a control group: {error}")
    try:
        names = [group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists()]
        if not names:
            pytest.skip("no right to make a control group: it has no limit of memory")
        names[0].write_text(str(limit))
        experts = times * len(few[0].down_proj)
        path = repeated(few, times, tmp_path / "experts.safetensors")
        assert path.stat().st_size > 1.5 * limit
        enter = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        running = process(path, experts, [*range(experts)], enter)
        found = told(running)
        assert found["ahead"] and found["y"] == answer(few, [*range(len(few[0].down_proj))] * times)
        _, words = running.communicate("")
        assert "what does not fit is read from disk again and again" in words
    except PermissionError as error:
        pytest.skip(f"no right to make a control group: {error}")
    finally:
        group.rmdir()
