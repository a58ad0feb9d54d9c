# SPDX-License-Identifier: Apache-2.0
"""A machine with an Intel GPU that is not there: a driver of Level Zero (zsim) that runs SPIR-V by OpenCL on the CPU.

Its OpenCL is Intel's runtime for CPUs, which takes SPIR-V with sub-groups: `pip install intel-opencl-rt intel-cmplr-lib-rt`
(0.8 GB, Intel's licence: for tests alone) into an environment that LOWBIT_INTEL_OPENCL names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from ctypes.util import find_library
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "zsim"


def _missing() -> str:
    if not os.environ.get("LOWBIT_INTEL_OPENCL"):
        return "LOWBIT_INTEL_OPENCL does not name an environment with Intel's OpenCL runtime"
    if not _runtime().exists():
        return f"{_runtime()} is not there"
    if not find_library("OpenCL") or not Path("/usr/include/CL/cl.h").exists():
        return "no libOpenCL.so.1 or CL/cl.h (Debian: ocl-icd-libopencl1, opencl-c-headers)"
    return "" if shutil.which("g++") else "no g++ on this machine"


def _runtime() -> Path:
    return Path(os.environ["LOWBIT_INTEL_OPENCL"], "lib", "libintelocl.so")


@pytest.fixture(scope="session")
def zsim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process on that machine; LOWBIT_ZSIM_DEVICE is for the test to set."""
    if reason := _missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("zsim")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{HERE.parents[2] / 'csrc'}"]
    library = str(folder / "libze_loader.so.1")
    subprocess.run(["g++", *flags, str(HERE / "zsim.cpp"), "-o", library, "-l:libOpenCL.so.1"], check=True)
    (folder / "intel.icd").write_text(f"{_runtime()}\n")  # the one that is shipped has a placeholder in it
    return {"LOWBIT_LEVEL_ZERO_PATH": str(folder), "OCL_ICD_VENDORS": str(folder), "LOWBIT_ZSIM_DPAS": str(HERE / "dpas.cl")}
