# SPDX-License-Identifier: Apache-2.0
"""A machine with one GPU of Level Zero: zsim, our own driver, over Intel's OpenCL for CPUs, behind the real loader."""

from __future__ import annotations

import os
import shutil
import subprocess
from ctypes.util import find_library
from pathlib import Path

import pytest

ZSIM = Path(__file__).parent / "zsim"


def missing() -> str:
    """Why there is no such machine here, or nothing."""
    folder = os.environ.get("LOWBIT_LEVEL_ZERO_OPENCL")
    if not folder:
        return "LOWBIT_LEVEL_ZERO_OPENCL names no folder with libintelocl.so (tools/level_zero_env FOLDER makes one)"
    if not Path(folder, "libintelocl.so").exists():
        return f"no libintelocl.so in {folder} (LOWBIT_LEVEL_ZERO_OPENCL)"
    if not find_library("ze_loader"):
        return "no libze_loader.so.1 (apt install libze1)"
    headers = [name for name in ("level_zero/ze_api.h", "CL/cl.h") if not Path("/usr/include", name).exists()]
    if headers:
        return f"no {' and '.join(headers)} (apt install libze-dev opencl-c-headers)"
    return "" if shutil.which("g++") else "no g++"


@pytest.fixture(scope="session")
def zsim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process on that machine, with the loader's validation on."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("zsim")
    driver = folder / "libze_intel_gpu_zsim.so"
    sources = [str(path) for path in sorted(ZSIM.glob("*.cpp"))]
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", *sources, "-o", str(driver), "-ldl"]
    subprocess.run(command, check=True)
    return {
        "ZE_ENABLE_ALT_DRIVERS": str(driver),
        "ZE_ENABLE_VALIDATION_LAYER": "1",
        "ZE_ENABLE_PARAMETER_VALIDATION": "1",
        "ZSIM_OPENCL": str(Path(os.environ["LOWBIT_LEVEL_ZERO_OPENCL"], "libintelocl.so")),
        "LOWBIT_CACHE_DIR": str(folder / "cache"),
    }
