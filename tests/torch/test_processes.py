# SPDX-License-Identifier: Apache-2.0
"""Processes and threads: fork after use, two threads at once, one thread, DataLoader workers, import orders."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from settings import same_for_any_threads

import lowbit
from lowbit import testing
from lowbit.testing import LinearCase, cached_data, run_linear

CASE = LinearCase(33, 97, 300, "float32", "int4", 32, "symmetric", "int8_group", "float32", "silu")

SETUP = """
import torch, lowbit
from lowbit import testing
case = testing.LinearCase(33, 97, 300, "float32", "int4", 32, "symmetric", "int8_group")
data = testing.make_data(case)
wanted = testing.run_linear(case, data)
"""


def test_two_threads_at_once_get_the_same_result() -> None:
    data = cached_data(CASE)
    wanted = run_linear(CASE, data)
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda _: [run_linear(CASE, data) for _ in range(50)], range(2)):
            assert all(torch.equal(y, wanted) for y in result)


def test_forcing_a_row_in_one_thread_does_not_touch_another() -> None:
    data = cached_data(CASE)
    last = [str(row["name"]) for row in testing.rows() if row["available"] and testing.serves(str(row["name"]), CASE)][-1]
    run_linear(CASE, data)
    usual = lowbit._C.last_kernel("linear")
    with lowbit.force_kernel(last), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (run_linear(CASE, data), lowbit._C.last_kernel("linear"))[1]).result() == usual


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    same_for_any_threads(lambda: run_linear(CASE, cached_data(CASE)), (1, 2, 5))


@pytest.mark.parametrize("threads", ["1", "2"])
def test_fork_after_use(python: Callable[..., str], threads: str) -> None:
    code = f"""
{SETUP}
import os, signal
torch.set_num_threads({threads})
testing.run_linear(case, data)
child = os.fork()
if child == 0:
    signal.alarm(60)  # a hang ends the child
    os._exit(0 if torch.equal(testing.run_linear(case, data), wanted) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert torch.equal(testing.run_linear(case, data), wanted)
print("ok")
"""
    assert "ok" in python(code)


def test_fork_after_torch_used_its_threads_and_lowbit_did_not(python: Callable[..., str]) -> None:
    code = f"""
import torch, lowbit
import os, signal
torch.set_num_threads(2)
x = torch.randn(1 << 22).exp_()  # torch's workers start
child = os.fork()
if child == 0:
    signal.alarm(100)  # a hang ends the child
    {SETUP.strip().replace(chr(10), chr(10) + "    ")}
    os._exit(0 if torch.allclose(wanted.double(), data.wanted, atol=1e-2) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
print("ok")
"""
    assert "ok" in python(code)


ALONE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("lowbit._C", {lowbit._C.__file__!r})
alone = importlib.util.module_from_spec(spec)
spec.loader.exec_module(alone)
"""


def test_another_liblowbit_on_the_library_path_is_not_taken(python: Callable[..., str], tmp_path: Path) -> None:
    shutil.copy(lowbit._C.__file__, tmp_path / "liblowbit.so")  # a library without a symbol of ours
    code = f"{ALONE}\nprint(*[line.split()[-1] for line in open('/proc/self/maps') if 'liblowbit' in line and str({str(tmp_path)!r}) in line], alone.version)"
    assert python(code, LD_LIBRARY_PATH=str(tmp_path)).strip() == lowbit.__version__


def test_a_failure_of_torch_parallel_for_is_an_error(python: Callable[..., str], tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc on this machine: the torch that fails is C")
    failing = "int torch_parallel_for() { return 1; }\nint torch_get_num_threads(unsigned* count) { *count = 2; return 0; }\n"
    (tmp_path / "torch.c").write_text(failing)
    subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "torch.c", "-o", tmp_path / "torch.so"], check=True)
    code = f"""
import ctypes
ctypes.CDLL({str(tmp_path / "torch.so")!r}, mode=ctypes.RTLD_GLOBAL)
{ALONE}
try:
    print(alone.read_bandwidth(1 << 20, 1, 2))
except RuntimeError as error:
    print(error)
"""
    assert "torch_parallel_for failed with status 1" in python(code)


def test_threads_are_torchs_as_soon_as_it_is_imported(python: Callable[..., str]) -> None:
    code = f"""
{ALONE}
before = [alone.threads()["source"] for _ in range(3)]
import json  # a library that is not torch
import torch
torch.set_num_threads(3)
print(before, alone.threads())
"""
    assert python(code).strip() == str(["own pool (torch is not loaded)"] * 3) + " {'count': 3, 'source': 'torch_parallel_for'}"


def test_two_threads_at_once_share_our_own_pool(python: Callable[..., str]) -> None:
    int4 = lowbit._C.FORMATS["int4"]
    code = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
{ALONE}
_C = alone

weight = np.random.default_rng(0).standard_normal((512, 256), dtype=np.float32)

def pack():
    packed = np.zeros(_C.packed_shape(0, 512, 256, {int4}, 32, False), np.uint8)
    _C.quantize(weight, packed, {int4}, 32, False, 0)
    return packed.tobytes()

wanted = pack()
with ThreadPoolExecutor(2) as pool:
    assert all(got == wanted for got in pool.map(lambda _: pack(), range(40)))
assert "torch" not in sys.modules
print(_C.threads()["count"], _C.threads()["source"])
"""
    assert python(code, OMP_NUM_THREADS="4", TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "4 own pool (torch is not loaded)\n"


@pytest.mark.parametrize("first", ["import torch, lowbit", "import lowbit, torch"])
def test_both_import_orders_compute(python: Callable[..., str], first: str) -> None:
    assert "ok" in python(f"{first}\n{SETUP}\nassert torch.allclose(wanted.double(), data.wanted, atol=1e-2)\nprint('ok')")


def test_data_loader_workers_compute(python: Callable[..., str]) -> None:
    code = f"""
{SETUP}
from torch.utils.data import DataLoader
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 33
    def __getitem__(self, i): return torch.ops.lowbit.linear(data.x[i:i+1], data.packed, *case.op_args)[0]
if __name__ == "__main__":
    got = torch.cat(list(DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork")))
    assert torch.equal(got, wanted)
    print("ok")
"""
    assert "ok" in python(code)


def test_one_openmp_runtime_is_loaded(python: Callable[..., str]) -> None:
    code = f"{SETUP}\nmaps = open('/proc/self/maps').read()\nprint(len({{l.split()[-1] for l in maps.splitlines() if 'libgomp' in l or 'libiomp' in l or 'libomp' in l}}))"
    assert int(python(code)) <= 1


def test_lowered_isa_is_honoured_and_reported(python: Callable[..., str]) -> None:
    code = f"{SETUP}\nprint(lowbit._C.isa()['chosen'], lowbit._C.last_kernel('linear'))"
    chosen, row = python(code, LOWBIT_ISA="scalar").split()
    assert chosen == "scalar" and "scalar" in row


def test_an_unknown_isa_is_named_by_every_op_and_by_info(python: Callable[..., str]) -> None:
    code = f"try:\n    {SETUP.strip().replace(chr(10), chr(10) + '    ')}\nexcept ValueError as error:\n    print(error)"
    wanted = "LOWBIT_ISA must be one of amx, avx512_bf16, avx512_vnni, avx512, avx2_vnni, avx2, scalar, got 'foo'"
    assert wanted in python(code, LOWBIT_ISA="foo")
    assert f"none, every op fails ({wanted})" in python("import lowbit; print(lowbit.info())", LOWBIT_ISA="foo")


def test_kernel_forced_by_the_environment_runs_or_fails_loudly(python: Callable[..., str]) -> None:
    code = f"{SETUP}\nprint(lowbit._C.last_kernel('linear'))"
    scalar = next(str(row["name"]) for row in reversed(testing.rows()) if testing.serves(str(row["name"]), CASE))
    assert python(code, LOWBIT_KERNEL=scalar).strip() == scalar
    failing = "try:\n    import torch, lowbit\n    from lowbit import testing\n    case = testing.LinearCase(1, 5, 5)\n    testing.run_linear(case, testing.make_data(case))\nexcept ValueError as error:\n    print(error)"
    assert "unknown kernel row" in python(failing, LOWBIT_KERNEL="linear_of_nobody")
