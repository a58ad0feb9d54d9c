# SPDX-License-Identifier: Apache-2.0
"""`lowbit_ze` as a device of torch, on zsim: in a process of its own, because enabling it cannot be undone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nested import Check, Run, checks

from lowbit.score.program_cache import bind

HERE = Path(__file__).parent


@pytest.mark.core
@pytest.mark.parametrize("check", checks(*(HERE / f"on_zsim/check_{name}.py" for name in ("torch_device", "attention", "optim", "quantize"))), ids=str)
def test_checks(check: Check, zsim: dict[str, str], passes: Callable[..., Run]) -> None:
    done = passes(check, **zsim)
    assert "ze_validation" not in (done.said + done.errors).lower() and "zsim:" not in done.errors, str(done)


@pytest.mark.parametrize("first, second", [("simulated", "level_zero"), ("level_zero", "simulated")])
def test_one_of_our_devices_in_a_process(first: str, second: str, zsim: dict[str, str], python_after_torch: Callable[..., str]) -> None:
    names = {"simulated": "lowbit_sim", "level_zero": "lowbit_ze"}
    code = f"""
import torch
from lowbit import _C
from lowbit.devices import {first}, {second}
{first}.enable()
try:
    {second}.enable()
except RuntimeError as error:
    print(error)
x = torch.arange(3.0, device="{names[first]}") + 1
print(x.tolist(), {first}.enabled(), {second}.enabled(), _C.kernels("linear") is not None)
"""
    told = python_after_torch(code, **zsim).splitlines()
    assert told == [
        f"{second}.enable: torch has one place for a device of this kind in a process, and '{names[first]}' has taken it",
        "[1.0, 2.0, 3.0] True False True",
    ]


def test_a_machine_without_a_gpu_says_why_and_stays_as_it_was(python_after_torch: Callable[..., str]) -> None:
    code = """
import torch, lowbit
from lowbit.devices import level_zero, simulated
try:
    level_zero.enable()
except RuntimeError as error:
    print(error)
print(lowbit.info()["level_zero"])
print(torch._C._get_privateuse1_backend_name(), level_zero.enabled())
simulated.enable()
print(torch.ones(2, device="lowbit_sim").sum().item())
"""
    error, fact, state, total = python_after_torch(code, ZE_ENABLE_ALT_DRIVERS="/no/driver.so", LOWBIT_LEVEL_ZERO_PATH="").splitlines()
    assert "no driver of a GPU" in error or "libze_loader" in error
    assert fact == f"not available: {error}"
    assert (state, total) == ("privateuseone False", "2.0")


def test_import_and_autoload_open_nothing(zsim: dict[str, str], python: Callable[..., str]) -> None:
    code = "import torch, lowbit; print('ze_loader' in open('/proc/self/maps').read(), torch._C._get_privateuse1_backend_name())"
    assert python(code, **zsim).split() == ["False", "privateuseone"]


def test_no_memory_is_torchs_error_and_passes(zsim: dict[str, str], python_after_torch: Callable[..., str]) -> None:
    code = """
import ctypes, os, torch
from lowbit.devices import level_zero
level_zero.enable()
driver = ctypes.CDLL(os.environ["ZE_ENABLE_ALT_DRIVERS"])
x = torch.ones(3, device="lowbit_ze")
driver.zsim_fail(b"memory", 0)
for make in (lambda: torch.empty(1000, device="lowbit_ze"), lambda: torch.UntypedStorage(4000, device="lowbit_ze")):
    try:
        make()
    except torch.OutOfMemoryError as error:
        print(str(error).splitlines()[0])
driver.zsim_fail(b"", 0)
print((x + 1).tolist())
"""
    words = "lowbit_ze:0: out of memory: tried to allocate 4000 bytes; 12 of 17179869184 bytes are in use"
    assert python_after_torch(code, **zsim).splitlines() == [words, words, "[2.0, 2.0, 2.0]"]


def test_a_lost_device_is_an_error_of_all_that_touches_it(zsim: dict[str, str], python_after_torch: Callable[..., str]) -> None:
    code = """
import ctypes, os, torch, lowbit
from lowbit.devices import level_zero
level_zero.enable()
layer, x = torch.nn.Sequential(torch.nn.Linear(64, 64)).to("lowbit_ze"), torch.ones(2, 64, device="lowbit_ze")
lowbit.quantize_(layer, lowbit.int8_weight_only())
ctypes.CDLL(os.environ["ZE_ENABLE_ALT_DRIVERS"]).zsim_fail(b"lost", 0)
with torch.no_grad():
    for run in (lambda: layer(x), lambda: x + 1, lambda: x.cpu(), lambda: torch.empty(3, device="lowbit_ze")):
        try:
            run()
        except RuntimeError as error:
            print("the device is lost" in str(error))
print((torch.ones(2) + 1).tolist())
"""
    assert python_after_torch(code, **zsim).splitlines() == ["True"] * 4 + ["[2.0, 2.0]"]


def test_rows_for_torchs_own_xpu_need_such_a_torch(zsim: dict[str, str], python_after_torch: Callable[..., str]) -> None:
    code = """
from lowbit import _C
rows = {row["name"]: row for row in _C.kernels("linear") if row["backend"].startswith("level_zero")}
ours = {name for name, row in rows.items() if row["device"] == "lowbit_ze" and row["available"]}
theirs = {name for name, row in rows.items() if row["device"] == "xpu"}
print(len(ours) > 0 and theirs == {name + "_xpu" for name in ours}, {rows[name]["reason"] for name in theirs})
"""
    assert python_after_torch(code, **zsim) == "True {'this torch is not built for xpu, or has no syncStreamsOnDevice'}\n"


def test_rows_for_torchs_own_xpu_wait_for_its_queues(xpu_program: Callable[..., str]) -> None:
    assert xpu_program("xpu_tensors.cpp").splitlines() == [
        "dequantize_panels_level_zero_xpu 0", "dequantize_rows_level_zero_xpu 0",
        "embedding: indices must be 0..19, got another one at index 0 of [1]",
    ]  # fmt: skip


def test_mods_on_torchs_own_xpu(xpu_program: Callable[..., str]) -> None:
    table = torch.randn(40)
    code = bind("test", lambda s, b, h, q, k: s + table[k], mask=False).code
    row, error = xpu_program("xpu_mods.cpp", *code).splitlines()
    assert row == "attention_forward_tiles_level_zero_xpu 1"
    assert re.fullmatch(r"attend: score_mod reads index 3\d of dimension 0 of captured tensor 0, which has size 30", error), error


def test_the_example_of_gpus_runs_here(zsim: dict[str, str]) -> None:
    example = [str(HERE.parents[1] / "examples/07_on_a_gpu.py"), "--device", "lowbit_ze"]
    sizes = "--width 128 --rounds 1 --sentences 3 --tokens 2".split()
    done = subprocess.run([sys.executable, *example, *sizes], env=os.environ | zsim, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    cosines = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("int")][:3]
    losses = [line.split()[-1] for line in done.stdout.splitlines() if "AdamW" in line]
    assert done.stdout.startswith("lowbit_ze (zsim)") and min(cosines) > 0.95 and len(losses) == 3 and len(set(losses)) == 1


@pytest.mark.parametrize(
    "pci_id, told, row",
    [("", "16", "dpas_"), ("", "8", "dpas_"), ("0x0bd5", "0", ""), ("0x0bd5", None, "dpas_"), ("", None, "")],
)
def test_what_a_driver_says_of_dpas_counts_and_the_pci_id_where_it_says_nothing(
    pci_id: str, told: str | None, row: str, zsim: dict[str, str], python_after_torch: Callable[..., str]
) -> None:
    code = """
import torch, lowbit
from lowbit.devices import level_zero
level_zero.enable()
layer = torch.nn.Sequential(torch.nn.Linear(64, 32))
lowbit.quantize_(layer, lowbit.int4_weight_only(group_size=32))
layer.to("lowbit_ze")
print(lowbit.explain(layer)[0].row)
"""
    said = {"ZSIM_DPAS": told} if told else {}
    assert python_after_torch(code, **zsim, ZSIM_DEVICE=pci_id or "0", **said).split() == [f"linear_int4_{row}level_zero"]
