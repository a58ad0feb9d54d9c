# SPDX-License-Identifier: Apache-2.0
"""Intel's offline compiler (Debian: intel-opencl-icd 22.43 has ocloc): the code of a module for a GPU that is not here."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

LANES = {"dg2": 8, "pvc": 16}
"""Devices that it knows, and the sub-groups of their dpas."""


@functools.cache
def missing() -> str:
    """Why it is not there, or nothing."""
    if not shutil.which("ocloc"):
        return "ocloc is not there"
    return "" if _disassembler() else "libiga64.so.1, ocloc's disassembler, is not there"


@functools.cache
def _disassembler() -> Path | None:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"libiga64\.so\.1 .* => (\S+)", listed)
    return Path(found[1]) if found else None


@dataclass(frozen=True)
class Kernel:
    """The instructions of a kernel, one a line."""

    code: str

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.code))

    def bytes_of_block_reads(self, smallest: int) -> int:
        """By all block reads of global memory of at least so many bytes: Xe-HPC's, and owords (16 bytes) of Xe-HPG."""
        dwords = [4 * int(count) for count in re.findall(r"load\.ugm\.d32x(\d+)t\.a64", self.code)]
        owords = [16 * int(count) for count in re.findall(r"a64 (?:aligned )?oword block read x(\d+)", self.code)]
        return sum(size for size in dwords + owords if size >= smallest)


@dataclass(frozen=True)
class Compiled:
    kernels: dict[str, Kernel]
    spilled: list[str]
    """What the compiler says of kernels whose registers went to memory."""


def compile_module(module: bytes, device: str, folder: Path, options: str = "") -> Compiled:
    """The kernels of a SPIR-V module for a device."""
    (folder / "module.spv").write_bytes(module)
    command = ["ocloc", "compile", "-spirv_input", "-file", "module.spv", "-device", device, "-output", "module", *(["-options", options] if options else [])]
    said = _run(command, folder)
    binary = next(folder.glob("module_*.bin"))
    links = folder / "library"
    links.mkdir()
    (links / "libiga64.so").symlink_to(str(_disassembler()))  # it opens the name without a version
    _run(["ocloc", "disasm", "-file", binary.name, "-device", device, "-dump", "code"], folder, str(links))
    kernels = {
        path.name.removesuffix("_KernelHeap.asm"): Kernel(path.read_text())
        for path in (folder / "code").glob("*_KernelHeap.asm")
        if not path.name.startswith("Intel_Symbol_Table")
    }
    return Compiled(kernels, re.findall(r"kernel .* spilled .*", said))


def _run(command: list[str], folder: Path, libraries: str = "") -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr
