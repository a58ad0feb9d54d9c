# SPDX-License-Identifier: Apache-2.0
"""A machine with an Intel GPU that is not there: a driver of Level Zero (zsim.cpp) that runs SPIR-V by OpenCL on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import opencl
import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def zsim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process on that machine; LOWBIT_ZSIM_DEVICE is for the test to set."""
    if reason := opencl.missing():
        pytest.skip(reason)
    if shutil.which("g++") is None or not Path("/usr/include/CL/cl.h").exists():
        pytest.skip("no g++, or no CL/cl.h (Debian: opencl-c-headers), to build zsim with")
    folder = tmp_path_factory.mktemp("zsim")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{HERE.parents[1] / 'csrc'}"]
    library = str(folder / "libze_loader.so.1")
    subprocess.run(["g++", *flags, str(HERE / "zsim.cpp"), "-o", library, "-l:libOpenCL.so.1"], check=True)
    runtime = Path(os.environ["LOWBIT_INTEL_OPENCL"], "lib", "libintelocl.so")
    (folder / "intel.icd").write_text(f"{runtime}\n")  # the one that is shipped has a placeholder in it
    return {"LOWBIT_LEVEL_ZERO_PATH": str(folder), "OCL_ICD_VENDORS": str(folder), "LOWBIT_ZSIM_DPAS": str(HERE / "dpas.cl")}
