# SPDX-License-Identifier: Apache-2.0
"""Faults between our client and a driver: they are told by name, nothing is half done, and the CPU goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

LAYER = """
import torch, lowbit
from lowbit.devices import level_zero
level_zero.enable()
torch.manual_seed(0)
layer = torch.nn.Sequential(torch.nn.Linear(64, 16))
lowbit.quantize_(layer, lowbit.int8_weight_only())
x = torch.randn(1, 64)
with torch.no_grad():
    here = layer(x)
    layer.to("lowbit_ze")
    try:
        print(torch.allclose(layer(x.to("lowbit_ze")).cpu(), here, rtol=1e-5, atol=1e-6))
    except RuntimeError as error:
        print(error)
    print(torch.equal(layer.to("cpu")(x), here))
"""


def test_a_module_that_the_driver_refuses_is_named_with_its_log(zsim: dict[str, str], tmp_path: Path, python_after_torch: Callable[..., str]) -> None:
    said = python_after_torch(LAYER, **(zsim | {"ZSIM_FAIL": "build", "LOWBIT_CACHE_DIR": str(tmp_path)})).strip().splitlines()
    assert said[0] == (
        "zsim: building linear_activations (the driver: zsim was told to fail) failed: "
        "the driver could not build the module (0x70000004)"
    )
    assert said[-1] == "True" and not list(tmp_path.rglob("*.native"))


@pytest.mark.parametrize("spoil", [lambda image: image[: len(image) // 2], lambda image: image[:-9] + bytes([image[-9] ^ 1]) + image[-8:]])
def test_a_kept_module_that_is_not_whole_is_built_anew(
    spoil: Callable[[bytes], bytes], zsim: dict[str, str], tmp_path: Path, python_after_torch: Callable[..., str]
) -> None:
    there = zsim | {"LOWBIT_CACHE_DIR": str(tmp_path)}
    assert python_after_torch(LAYER, **there).split() == ["True", "True"]
    kept = {path: path.read_bytes() for path in (tmp_path / "level_zero").glob("*.native")}
    assert len(kept) == 2
    for path, image in kept.items():
        path.write_bytes(spoil(image))
    assert python_after_torch(LAYER, **there).split() == ["True", "True"]
    assert {path: path.read_bytes() for path in (tmp_path / "level_zero").glob("*.native")} == kept


@pytest.mark.parametrize(
    "spilled, spilled_of_large, taken", [(0, 0, ""), (100, 0, " with large registers"), (100, 100, "")]
)
def test_a_kernel_that_spills_registers_is_taken_from_a_build_with_more(
    spilled: int, spilled_of_large: int, taken: str, zsim: dict[str, str], tmp_path: Path, python_after_torch: Callable[..., str]
) -> None:
    there = zsim | {"LOWBIT_CACHE_DIR": str(tmp_path), "ZSIM_SPILLS": f"linear_1 {spilled} {spilled_of_large}"}
    for _ in range(2):  # built, and from the cache
        said = python_after_torch(LAYER, **there).splitlines()
        assert [line for line in said if "linear_1" in line] == [f"zsim: linear_1{taken}"] and "True" in said
        assert any(line.startswith("zsim:") and "linear_1" not in line and "large" not in line for line in said)
        assert len(list((tmp_path / "level_zero").glob("*.native"))) == (3 if spilled else 2)


def test_a_forked_child_is_told_that_the_gpu_is_its_parents(zsim: dict[str, str], python_after_torch: Callable[..., str]) -> None:
    code = """
import os, torch, lowbit
from lowbit.devices import level_zero
def in_child(work):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.write(write, work().encode())
        finally:
            os._exit(0)
    os.wait()
    return os.read(read, 1000).decode()
def sum_there():
    try:
        level_zero.enable()
        return str(torch.ones(3, device="lowbit_ze").sum().item())
    except RuntimeError as error:
        return str(error).splitlines()[0]
def drop():
    global x
    del x
    return str(torch.ones(3).sum().item())
print(in_child(sum_there))
level_zero.enable()
x = torch.ones(5, device="lowbit_ze")
print(in_child(sum_there))
print(in_child(drop))
print(x.sum().item())
"""
    refused = (
        "lowbit_ze:0: this process was forked from one that had opened Level Zero, which does not survive that; "
        "start it by multiprocessing's method 'spawn', or before a GPU is used"
    )
    assert python_after_torch(code, **zsim).splitlines() == ["3.0", refused, "3.0", "5.0"]
