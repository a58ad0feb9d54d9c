# SPDX-License-Identifier: Apache-2.0
"""The rows for CUDA on a machine without a GPU: driver and NVRTC are emulated (emulated_cuda.cpp), kernels run on the host.

It cannot see speed, occupancy, the memory model between CTAs, a real driver. `gpu` tests are for those.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nested import Check, Run, checks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.core
@pytest.mark.parametrize("check", checks(*(HERE / "emulated").glob("check_*.py")), ids=str)
def test_checks(check: Check, emulated: dict[str, str], passes: Callable[..., Run]) -> None:
    passes(check, **emulated)


def test_the_ops_pass_their_tests_by_rows_for_cuda(emulated: dict[str, str], nested: Callable[..., Run], request: pytest.FixtureRequest) -> None:
    """A share of tests/ops, as `LOWBIT_TEST_DEVICE` runs it on any device; a smaller one of every pair of dtypes, which is 9 kernels for g++."""
    files, ran = [ROOT / "tests/ops" / name for name in ("test_optim.py", "test_state_formats.py")], set()
    for which, share in (("not every_pair", 7), ("every_pair", 8 * request.config.option.share)):
        done = nested(*files, "-k", f"cuda_sim and {which}", share=share, **emulated, LOWBIT_TEST_DEVICE="lowbit_sim:1")
        assert done.code == 0, str(done)
        ran |= set(re.search(r"rows that ran on lowbit_sim:1: (.*)", done.said)[1].split())
    for row in {f"optim_step_{format}_cuda_sim" for format in ("float32", "dynamic8", "dynamic4", "float8")} - ran:  # left out by the draw
        done = nested(files[0], "-k", f"{row} and first_step_from_zeros", share=1, **emulated, LOWBIT_TEST_DEVICE="lowbit_sim:1")
        assert done.code == 0 and row in re.search(r"rows that ran on lowbit_sim:1: (.*)", done.said)[1].split(), str(done)


TOOLS = {  # that the fake run has in the place of a real one's
    "pip": "echo pip $*",
    "python": f'exec "{sys.executable}" "$@"',
    "nvidia-smi": "echo name, driver_version",
    "compute-sanitizer": 'while [[ $1 != python ]]; do shift; done; exec "$@"',
}


@pytest.mark.parametrize("part", ["tests", "ops", "benchmarks"])
def test_the_first_run_on_a_gpu_is_known_to_work(part: str, emulated: dict[str, str], tmp_path: Path) -> None:
    """benchmarks/on_gpu.sh as it is: tests marked gpu are skipped, those of the ops run on the emulated GPU, benchmarks read their arguments."""
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    changed = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", LOWBIT_GPU="lowbit_sim:1", LOWBIT_OPS=str(ROOT / "tests/ops/test_state_formats.py"),
                   LOWBIT_PROCESSES="0", LOWBIT_BENCH_ARGUMENTS="--help")  # fmt: skip
    command = ["bash", str(ROOT / "benchmarks/on_gpu.sh"), part, str(tmp_path / "out")]
    done = subprocess.run(command, env=os.environ | emulated | changed, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "done; failed: nothing" in done.stdout, done.stdout[-3000:] + done.stderr
    assert (tmp_path / "out" / f"on_gpu_{part}.txt").exists()
    words = {"tests": "deselected", "ops": "rows that ran on lowbit_sim:1", "benchmarks": "usage: bench_decode_cuda.py"}
    assert words[part] in done.stdout


NO_PACKAGES = """
import ctypes
from pathlib import Path
from lowbit import _C
library = ctypes.CDLL(str(Path(_C.__file__).with_name("liblowbit.so")))
nowhere = ctypes.create_string_buffer(24)  # a vector of no folders
library._ZN6lowbit7look_inESt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS6_EE(nowhere)
"""


def waits() -> list[Path]:
    """The file of each barrier and wait, in the order in which the emulation counts them."""
    files = sorted(path for room in ("cuda", "gpu") for path in (ROOT / "csrc" / room).rglob("*.cuh"))
    return [path for path in files for _ in re.findall(r"(?:__sync(?:threads|warp)\(|wait_for_(?:copies|kernels_before|(?:groups|products)<[^>]*>)\(|wait_for\([^;]*)\);", path.read_text())]


@pytest.mark.parametrize("number", range(len(waits())))
def test_without_a_barrier_or_a_wait_the_checks_fail(number: int, emulated: dict[str, str], nested: Callable[..., Run], tmp_path: Path) -> None:
    folder, file = waits()[number].parent.name, waits()[number].stem
    op = {"device": "linear"}.get(folder, folder)
    check = f"{HERE / 'emulated' / f'check_{op}.py'}::test_barriers"
    environment = emulated | {"LOWBIT_CACHE_DIR": str(tmp_path), "LOWBIT_EMULATED_WITHOUT_WAIT": str(number), "LOWBIT_BARRIERS_OF": file}
    done = nested(check, share=1, **environment)
    assert done.code == 1 and "FAILED" in done.said, str(done)
    assert re.search(r"assert all\(torch.equal\(a, b\)|CUDA_ERROR_LAUNCH_FAILED|elements are|not close", done.said), str(done)


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"LOWBIT_EMULATED_VERSION": "12000"}, "the driver is of CUDA 12.0, wanted 12.1 or later"),
        ({"LOWBIT_EMULATED_CAPABILITY": "75"}, "compute capability 7.5, wanted 8.0 or later"),
        ({"LOWBIT_EMULATED_FAIL": "cuInit:100"}, "cuInit failed: CUDA_ERROR (100)"),
    ],
)
def test_a_machine_that_cannot_says_why(
    environment: dict[str, str], words: str, emulated: dict[str, str], python_after_torch: Callable[..., str]
) -> None:
    code = "from lowbit import _C; print(_C.cuda.unavailable(0)); print([row['reason'] for row in _C.kernels('optim_step') if row['device'] == 'cuda'])"
    told = python_after_torch(code, **emulated, **environment)
    assert told.count(words) >= 2


@pytest.mark.parametrize(
    "environment, early",
    [
        ({}, True),
        ({"LOWBIT_EARLY": "0"}, False),
        ({"LOWBIT_EMULATED_VERSION": "12020"}, False),  # whose graphs do not know of it
        ({"LOWBIT_EMULATED_CAPABILITY": "89"}, False),
    ],
    ids=str,
)
def test_products_begin_before_other_kernels_have_ended_where_they_can(
    environment: dict[str, str], early: bool, emulated: dict[str, str], python_after_torch: Callable[..., str], tmp_path: Path
) -> None:
    code = """
import torch
import lowbit
from lowbit import testing
from lowbit.devices import simulated
simulated.enable()
case = testing.LinearCase(3, 16, 64, "float16", "int8", 0, "symmetric", "float", None)
data = testing.make_data(case)
with lowbit.force_kernel("linear_int8_cuda_sim"):
    torch.ops.lowbit.linear(data.x.to("lowbit_sim:1"), data.packed.to("lowbit_sim:1"), *case.op_args)
"""
    log = tmp_path / "log"
    python_after_torch(code, **emulated, **environment, LOWBIT_EMULATED_LOG=str(log))
    launches = [line.split()[1:] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert [(name, rest[-1] == "early") for name, *rest in launches] == [("activations", early), ("linear", early)]


@pytest.mark.parametrize(("gpu", "target"), [("sm_130a", "compute_120"), ("sm_103a", "compute_90"), ("sm_86", "compute_80")])
def test_a_gpu_that_nvrtc_does_not_know_gets_ptx_of_the_nearest_before_it(
    gpu: str, target: str, emulated: dict[str, str], python_after_torch: Callable[..., str], tmp_path: Path
) -> None:
    code = """
import sys, torch
from lowbit import _C
from lowbit.devices import simulated
simulated.enable()
codes, scale = torch.zeros(8, dtype=torch.uint8, device="lowbit_sim:1"), torch.zeros(1, device="lowbit_sim:1")
_C.force_kernel("encode_state_float8_cuda_sim")
sys.stderr = sys.stdout
import os; os.dup2(1, 2)
_C.encode_state(torch.ones(8).to("lowbit_sim:1"), _C.STATE_FORMATS["float8"], True, 64, codes, scale)
print(codes.cpu().tolist())
"""
    told = python_after_torch(code, **emulated | {"LOWBIT_CACHE_DIR": str(tmp_path), "LOWBIT_EMULATED_CAPABILITY": gpu.strip("sm_a")})
    assert f"for {gpu} (as {target}, the nearest that NVRTC knows) in " in told
    assert len(set(told.splitlines()[-1].strip("[]").split(", "))) == 1 and "[0," not in told


def test_what_nvrtc_opens_by_name_is_opened_too_where_another_has_opened_nvrtc(python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    for name, source in {
        "libnvrtc.so.13": "int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }",
        "libnvrtc-builtins.so.13.0": '#include <unistd.h>\n__attribute__((constructor)) void say() { write(1, "opened\\n", 7); }',
    }.items():
        command = ["g++", "-x", "c", "-", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(tmp_path / name)]
        subprocess.run(command, input=source, text=True, check=True)
    code = f"""
import ctypes
ctypes.CDLL({str(tmp_path / "libnvrtc.so.13")!r})
from lowbit import _C
print(_C.cuda.libraries())
"""
    told = python_after_torch(code, LOWBIT_CUDA_PATH="")
    assert "opened" in told.splitlines() and str(tmp_path / "libnvrtc.so.13") in told


@pytest.mark.parametrize(("driver", "taken"), [("12080", "12"), ("13000", "13")])
def test_a_driver_of_cuda_12_gets_libraries_of_cuda_12(
    driver: str, taken: str, emulated: dict[str, str], python_after_torch: Callable[..., str], tmp_path: Path
) -> None:
    """It loads no code that a newer NVRTC made. The folders are in an order in which the other one comes first."""
    there = Path(emulated["LOWBIT_CUDA_PATH"])
    for major in ("13", "12"):
        (tmp_path / major).mkdir()
        shutil.copy(there / "libcuda.so.1", tmp_path / major / f"libnvrtc.so.{major}")
    folders = f"{tmp_path / '13'}:{tmp_path / '12'}" if taken == "12" else f"{tmp_path / '12'}:{tmp_path / '13'}"
    (tmp_path / "12" / "libcuda.so.1").symlink_to(there / "libcuda.so.1")
    code = "from lowbit import _C; print(_C.cuda.libraries())"
    told = python_after_torch(code, **emulated | {"LOWBIT_CUDA_PATH": folders, "LOWBIT_EMULATED_VERSION": driver})
    assert f"{tmp_path}/{taken}/libnvrtc.so.{taken}" in told


def test_an_nvrtc_that_is_too_old_is_refused(emulated: dict[str, str], python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    code = """
import torch
from lowbit import _C
from lowbit.devices import simulated
simulated.enable()
_C.force_kernel("encode_state_float8_cuda_sim")
codes, scale = torch.zeros(8, dtype=torch.uint8, device="lowbit_sim:1"), torch.zeros(1, device="lowbit_sim:1")
try:
    _C.encode_state(torch.ones(8).to("lowbit_sim:1"), _C.STATE_FORMATS["float8"], True, 64, codes, scale)
except RuntimeError as error:
    print(error)
"""
    told = python_after_torch(code, **emulated | {"LOWBIT_CACHE_DIR": str(tmp_path), "LOWBIT_EMULATED_NVRTC": "12.1"})
    assert ": NVRTC is 12.1 (" in told and told.strip().endswith("), wanted 12.6 or later")


def test_a_machine_without_a_driver_says_where_it_looked(python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    told = python_after_torch("from lowbit import _C; print(_C.cuda.unavailable(0))", LOWBIT_CUDA_PATH=str(tmp_path), CUDA_HOME="/nowhere")
    if not told.strip():
        pytest.skip("this machine has a driver of NVIDIA")
    assert f"libcuda.so.1 was not found in {tmp_path}, " in told and "/nowhere/lib64" in told


def test_where_no_folder_is_known_it_says_that_the_system_looked(
    python_after_torch: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOWBIT_CUDA_PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    told = python_after_torch(NO_PACKAGES + "print(_C.cuda.unavailable(0))")
    if not told.strip():
        pytest.skip("this machine has a driver of NVIDIA")
    assert "libcuda.so.1 was not found where the system looks" in told


CODE_OF_A_CALL = """
import torch
from lowbit import _C
from lowbit.devices import simulated
simulated.enable()
def encode(row):
    codes, scale = torch.zeros(8, dtype=torch.uint8, device="lowbit_sim:1"), torch.zeros(1, device="lowbit_sim:1")
    _C.force_kernel(row)
    try:
        _C.encode_state(torch.ones(8).to("lowbit_sim:1"), _C.STATE_FORMATS["float8"], True, 64, codes, scale)
        print(codes.cpu().tolist())
    except (NotImplementedError, RuntimeError) as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    finally:
        _C.force_kernel(None)
encode("encode_state_float8_cuda_sim")
encode("encode_state_float8_scalar_sim")
"""


def test_a_machine_without_nvrtc_says_what_to_install_and_the_cpu_goes_on(emulated: dict[str, str], python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(Path(emulated["LOWBIT_CUDA_PATH"], "libcuda.so.1"))
    alone = {"LOWBIT_CUDA_PATH": str(tmp_path), "CUDA_HOME": "/nowhere", "LOWBIT_CACHE_DIR": str(tmp_path)}
    failed, right = python_after_torch(NO_PACKAGES + CODE_OF_A_CALL, **emulated | alone).splitlines()
    assert failed.startswith("RuntimeError") and "libnvrtc" in failed and f"not found in {tmp_path}, " in failed and "pip install nvidia-cuda-nvrtc" in failed
    assert right == str([0x7E] * 8)


def test_a_lost_device_is_named_with_the_kernel_that_found_it(emulated: dict[str, str], python_after_torch: Callable[..., str]) -> None:
    lost = {"LOWBIT_EMULATED_FAIL": "cuStreamSynchronize:46", "LOWBIT_SYNC": "1"}
    failed, right = python_after_torch(CODE_OF_A_CALL, **emulated | lost).splitlines()[-2:]
    assert failed.startswith("RuntimeError lowbit_sim:1: encode_state of conversion of signed float8, blocks of 64, 1 CTAs of 256 threads failed: ")
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE (46)" in failed and right == str([0x7E] * 8)


def test_nvrtc_is_given_the_headers_that_a_compiler_would_open(emulated: dict[str, str], python_after_torch: Callable[..., str], tmp_path: Path) -> None:
    """csrc/cuda/CMakeLists.txt follows the includes, those of the C++ library too."""
    csrc, log = ROOT / "csrc", tmp_path / "log"
    python_after_torch(CODE_OF_A_CALL, **emulated | {"LOWBIT_CACHE_DIR": str(tmp_path), "LOWBIT_EMULATED_LOG": str(log)})
    given = {line.removeprefix("header ") for line in log.read_text().splitlines() if line.startswith("header ")}
    sources = sorted(path for room in ("cuda", "gpu") for path in csrc.glob(f"{room}/*/*.cuh"))
    made = subprocess.run(["g++", "-std=c++20", "-MM", f"-I{csrc}", "-x", "c++", *sources], capture_output=True, text=True, check=True)
    opened = {str(Path(name).relative_to(csrc)) for name in re.findall(rf"{csrc}/[^\s\\]+", made.stdout)}
    of_the_library = {name for path in opened for name in re.findall("^#include <(.*)>", (csrc / path).read_text(), re.MULTILINE)}
    assert len(opened) > 60 and given == opened | of_the_library


def test_importing_opens_nothing_of_nvidia(python: Callable[..., str], emulated: dict[str, str], tmp_path: Path) -> None:
    code = "import lowbit, torch; lowbit.optim.AdamW8bit([torch.nn.Parameter(torch.ones(9))]); print(open('/proc/self/maps').read().count('libnvrtc'))"
    assert python(code, LOWBIT_CACHE_DIR=str(tmp_path)).strip() == "0"
