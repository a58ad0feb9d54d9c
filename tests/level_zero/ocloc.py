# SPDX-License-Identifier: Apache-2.0
"""Intel's offline compiler (Debian: intel-opencl-icd 22.43 has ocloc; later intel-ocloc, with libigc2-tools): the code of a module
for a GPU that is not here.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

ALL_LANES = {"dg2": 8, "pvc": 16, "bmg": 16, "ptl": 16}
PLATFORMS = {"dg2": "xehpg", "pvc": "xehpc", "bmg": "xe2", "ptl": "xe3", "tgllp": "xelp"}
"""As the disassembler of newer compilers calls them."""

PRODUCT = r"dpas(?!\S+ .*?(r\d+):\w+ +null:\w+ +\1:\w+ +\1\.0:)"
"""A dpas but for those of a register by itself, which newer compilers put in front of others for Xe-HPG."""


@functools.cache
def missing() -> str:
    """Why it is not there, or nothing."""
    if not shutil.which("ocloc"):
        return "ocloc is not there"
    if not shutil.which("iga64") and not _disassembler():
        return "neither libiga64.so.1, the disassembler of old ocloc, nor iga64, that of new ones, is there"
    return ""


@functools.cache
def lanes() -> dict[str, int]:
    """Devices that it knows, and the sub-groups of their dpas."""
    return {} if missing() else {name: count for name, count in ALL_LANES.items() if _knows(name)}


def is_new() -> bool:
    """Whether it makes ELF, as compilers after 22.43 do: they put more registers in memory."""
    return bool(shutil.which("iga64"))


def _knows(device: str) -> bool:
    done = subprocess.run(["ocloc", "ids", device], capture_output=True, text=True, check=False, timeout=120)
    return "Matched ids" in done.stdout + done.stderr


@functools.cache
def _disassembler() -> Path | None:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"libiga64\.so\.1 .* => (\S+)", listed)
    return Path(found[1]) if found else None


@dataclass(frozen=True)
class Kernel:
    """The instructions of a kernel, one a line, and what the compiler put in memory of registers and of arrays."""

    code: str
    spilled_bytes: int = 0
    private_bytes: int = 0

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.code))

    def bytes_of_block_reads(self, smallest: int) -> int:
        """By all block reads of global memory of at least so many bytes: Xe-HPC's, and owords (16 bytes) of Xe-HPG."""
        dwords = [4 * int(count) for count in re.findall(r"load\.ugm\.d32x(\d+)t\.a64", self.code)]
        owords = [16 * int(count) for count in re.findall(r"a64 (?:aligned )?oword block read x(\d+)", self.code)]
        return sum(size for size in dwords + owords if size >= smallest)


def compile_module(module: bytes, device: str, folder: Path, options: str = "") -> dict[str, Kernel]:
    """The kernels of a SPIR-V module for a device; each as the runtime takes it (csrc/level_zero/runtime/program.cpp): by twice
    as many registers if it spills fewer so.
    """
    kernels = _compiled(module, device, folder / "small", options)
    if any(kernel.spilled_bytes for kernel in kernels.values()):
        for name, kernel in _compiled(module, device, folder / "large", f"{options} -ze-opt-large-register-file").items():
            if kernel.spilled_bytes < kernels[name].spilled_bytes:
                kernels[name] = kernel
    return kernels


def _compiled(module: bytes, device: str, folder: Path, options: str) -> dict[str, Kernel]:
    folder.mkdir()
    (folder / "module.spv").write_bytes(module)
    command = ["ocloc", "compile", "-spirv_input", "-file", "module.spv", "-device", device, "-output", "module", *(["-options", options] if options else [])]
    said = _run(command, folder)
    binary = next(folder.glob("module_*.bin"))
    made = binary.read_bytes()
    if b".ze_info" in made:
        sections = _sections(made)
        facts = sections[".ze_info"].decode().split("kernels_misc_info")[0]
        of_kernel = {text.split(maxsplit=1)[0]: text for text in re.split(r"\n  - name:", facts)[1:]}
        code = _code_of(sections, device, folder)
        found = {
            name: (_number(r"spill_size: *(\d+)", text), _number(r"private_size: *(\d+)", text))
            for name, text in of_kernel.items()
        }
    else:
        code = _dumped_code(binary, device, folder)
        found = {name: (_number(rf"kernel {name} .* spilled around (\d+)", said) * 4 * ALL_LANES.get(device, 8), 0) for name in code}
    return {name: Kernel(text, *found[name]) for name, text in code.items() if not name.startswith("Intel_Symbol_Table")}


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _dumped_code(binary: Path, device: str, folder: Path) -> dict[str, str]:
    """Of a compiler that packs its code in a format of its own (22.43)."""
    links = folder / "library"
    links.mkdir()
    (links / "libiga64.so").symlink_to(str(_disassembler()))  # it opens the name without a version
    _run(["ocloc", "disasm", "-file", binary.name, "-device", device, "-dump", "code"], folder, str(links))
    return {
        path.name.removesuffix("_KernelHeap.asm"): path.read_text()
        for path in (folder / "code").glob("*_KernelHeap.asm")
    }


def _sections(elf: bytes) -> dict[str, bytes]:
    """Of a compiler that makes ELF: one of code a kernel, and what it says of them."""
    (at,), (size, count, names) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, at + i * size) for i in range(count)]
    texts = headers[names][4]
    return {
        elf[texts + name :].split(b"\0", 1)[0].decode(): elf[begin : begin + length]
        for name, _, _, _, begin, length in headers
    }


def _code_of(sections: dict[str, bytes], device: str, folder: Path) -> dict[str, str]:
    code = {}
    for name, words in sections.items():
        if name.startswith(".text."):
            (folder / "kernel.bin").write_bytes(words)
            code[name.removeprefix(".text.")] = _run(["iga64", "-d", f"-p={PLATFORMS[device]}", "kernel.bin"], folder)
    return code


def _run(command: list[str], folder: Path, libraries: str = "") -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr
