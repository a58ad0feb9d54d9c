# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs that are not there: a driver and an NVRTC that compile device sources with g++ and run them on the host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import kept
import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
KERNEL = "-DLOWBIT_EMULATED_KERNEL -nostdinc++"  # std_on_host.hpp is its C++ library
# -Og: 0.23 s a kernel, -O1 0.32, and kernels run as fast: what they wait for is products, which are compiled with -O2.
KERNEL_FLAGS = "-std=c++20 -Og -g0 -w -fPIC -fno-gnu-unique -ffp-contract=off -U_FORTIFY_SOURCE"
# Not linked to libstdc++, which took a fifth of the time of a kernel: it comes with the emulated driver, to which kernels are linked.
LINK_FLAGS = "-shared -nodefaultlibs -Wl,--no-as-needed"
if os.environ.get("LOWBIT_TEST_SANITIZE") == "address":  # tools/sanitize
    KERNEL_FLAGS += " -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
    LINK_FLAGS = "-shared"  # with the libraries of the sanitizers


@pytest.fixture(scope="session")
def compiled() -> Path:
    """The folder of what g++ made of that machine, which is kept."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine: it stands for NVRTC")
    sources = [*HERE.glob("*_on_host.?pp"), HERE / "emulated_cuda.cpp", HERE / "emulated_cublas.cpp", CSRC / "gpu/device/std.cuh", Path(__file__)]
    return kept.folder("cuda", sources, KERNEL_FLAGS, LINK_FLAGS, make=make)


@pytest.fixture(scope="session")
def emulated(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process on that machine. Its cache of lowbit is empty at first."""
    return {"LOWBIT_CUDA_PATH": str(compiled), "LOWBIT_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "LOWBIT_SIM_GUARDS": "1"}


def make(folder: Path) -> None:
    for header in HERE.glob("*_on_host.hpp"):
        shutil.copy(header, folder)
    (folder / "kernels").mkdir()
    header, out = folder / "cuda_on_host.hpp", str(folder / "libcuda.so.1")
    # Precompiled, it saves 0.04 s of each kernel that is compiled later; what is no template is compiled here.
    subprocess.run(["g++", *KERNEL.split(), *KERNEL_FLAGS.split(), f"-I{CSRC}", "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
    subprocess.run(["g++", *KERNEL_FLAGS.split(), "-O2", "-c", *map(str, HERE.glob("*_on_host.cpp"))], cwd=folder, check=True)
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    compiler = f'-DLOWBIT_KERNEL_COMPILER="env -u LD_PRELOAD g++ {KERNEL} {KERNEL_FLAGS} {LINK_FLAGS}"'
    subprocess.run(["g++", *flags, compiler, str(HERE / "emulated_cuda.cpp"), "-o", out], check=True)
    (folder / "libnvrtc.so.13").symlink_to("libcuda.so.1")
    subprocess.run(["g++", *flags, str(HERE / "emulated_cublas.cpp"), "-o", str(folder / "libcublasLt.so.13")], check=True)
