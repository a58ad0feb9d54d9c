# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs that are not there: a driver and an NVRTC that compile device sources with g++ and run them on the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process on that machine; its cache of compiled kernels is empty at first."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine: it stands for NVRTC")
    folder = tmp_path_factory.mktemp("cuda")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    header, out = f'-DLOWBIT_ON_HOST="{HERE / "cuda_on_host.hpp"}"', str(folder / "libcuda.so.1")
    subprocess.run(["g++", *flags, header, str(HERE / "emulated_cuda.cpp"), "-o", out], check=True)
    (folder / "libnvrtc.so.13").symlink_to("libcuda.so.1")
    return {"LOWBIT_CUDA_PATH": str(folder), "LOWBIT_CACHE_DIR": str(folder / "cache")}
