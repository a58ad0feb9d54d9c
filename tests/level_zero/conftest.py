# SPDX-License-Identifier: Apache-2.0
"""A machine with one GPU of Level Zero: zsim, our own driver, over an OpenCL for CPUs, Intel's or PoCL, behind the real loader."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path

import kept
import opencl
import pytest

from lowbit import _C

HERE = Path(__file__).parent
LIBLOWBIT = Path(_C.__file__).with_name("liblowbit.so")
ZSIM = HERE / "zsim"
POCL = Path("/etc/OpenCL/vendors/pocl.icd")
TRANSLATOR = "llvm-spirv-15"


@pytest.fixture(autouse=True, scope="session")
def modules() -> None:
    """Run tests of this folder with a library that has the modules."""
    if reason := _C.level_zero.modules_missing():
        pytest.skip(reason)


def missing_intel() -> str:
    """Why Intel's OpenCL is not here, or nothing."""
    folder = os.environ.get("LOWBIT_LEVEL_ZERO_OPENCL")
    if not folder:
        return "LOWBIT_LEVEL_ZERO_OPENCL names no folder with libintelocl.so (tools/test_env makes one)"
    if not Path(folder, "libintelocl.so").exists():
        return f"no libintelocl.so in {folder} (LOWBIT_LEVEL_ZERO_OPENCL)"
    return ""


def missing_pocl() -> str:
    """Why PoCL is not here, or nothing."""
    if not POCL.exists() or not find_library("OpenCL"):
        return f"no {POCL} or no libOpenCL.so.1 (apt install pocl-opencl-icd)"
    return "" if shutil.which(TRANSLATOR) else f"no {TRANSLATOR} (apt install {TRANSLATOR})"


def missing() -> str:
    """Why a driver over them cannot be made and opened, or nothing."""
    if not find_library("ze_loader"):
        return "no libze_loader.so.1 (apt install libze1)"
    headers = [name for name in ("level_zero/ze_api.h", "CL/cl.h") if not Path("/usr/include", name).exists()]
    if headers:
        return f"no {' and '.join(headers)} (apt install libze-dev opencl-c-headers)"
    return "" if shutil.which("g++") else "no g++"


@pytest.fixture(scope="session")
def driver() -> Path:
    if reason := missing():
        pytest.skip(reason)
    sources = sorted(ZSIM.iterdir())
    folder = kept.folder("zsim", [*sources, Path(__file__)], make=make_driver)
    return folder / "libze_intel_gpu_zsim.so"


def make_driver(folder: Path) -> None:
    sources = [str(path) for path in sorted(ZSIM.glob("*.cpp"))]
    flags = ["-std=c++20", "-O1", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run(["g++", *flags, *sources, "-o", str(folder / "libze_intel_gpu_zsim.so"), "-ldl"], check=True)


def environment(driver: Path, library: str, cache: Path) -> dict[str, str]:
    return {
        "ZE_ENABLE_ALT_DRIVERS": str(driver),
        "ZE_ENABLE_VALIDATION_LAYER": "1",
        "ZE_ENABLE_PARAMETER_VALIDATION": "1",
        "ZSIM_OPENCL": library,
        "LOWBIT_CACHE_DIR": str(cache),
    }


@pytest.fixture(scope="session")
def zsim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process on that machine, with the loader's validation on."""
    if reason := missing_intel():
        pytest.skip(reason)
    on = environment(request.getfixturevalue("driver"), str(opencl.runtime()), tmp_path_factory.mktemp("cache"))
    return on | {"ZSIM_KEPT": str(opencl.kept_programs())}


@pytest.fixture
def xpu_program(zsim: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """Run a program of this folder with what stands for torch's library of xpu, and return what it prints."""
    library = tmp_path / "libc10_xpu.so"
    subprocess.run(["g++", "-shared", "-fPIC", HERE / "fake_c10_xpu.cpp", f"-Wl,-soname,{library.name}", "-o", library], check=True)

    def run(source: str, *arguments: object) -> str:
        linked = ["-Wl,--no-as-needed", library, LIBLOWBIT, f"-Wl,-rpath,{tmp_path}", f"-Wl,-rpath,{LIBLOWBIT.parent}"]
        command = ["g++", "-std=c++20", f"-I{HERE.parents[1] / 'csrc'}", HERE / source, *linked, "-o", tmp_path / "program"]
        subprocess.run(command, check=True)
        made = [tmp_path / "program", *map(str, arguments)]
        done = subprocess.run(made, env=os.environ | zsim, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def zsim_on_pocl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Likewise over PoCL, which is free software: bitcode made of the SPIR-V, and no functions of sub-groups."""
    if reason := missing_pocl():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pocl")
    Path(folder, "pocl.icd").write_text(POCL.read_text())
    flags = {"OCL_ICD_VENDORS": str(folder), "ZSIM_TRANSLATOR": TRANSLATOR, "ZSIM_FLAGS": "-x spir -spir-std=1.2"}
    return environment(request.getfixturevalue("driver"), "libOpenCL.so.1", folder / "cache") | flags
