# SPDX-License-Identifier: Apache-2.0
"""OpenCL on a CPU that takes SPIR-V with sub-groups, by ctypes: Intel's runtime (PyPI intel-opencl-rt, intel-cmplr-lib-rt).

LOWBIT_LEVEL_ZERO_OPENCL names the folder of its libintelocl.so (tools/test_env); the system has the loader (Debian: ocl-icd-libopencl1).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from ctypes import byref, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from ctypes.util import find_library
from pathlib import Path

import kept

DEVICE_TYPE_ALL, BUILD_LOG, INDIRECT_ACCESS = 0xFFFFFFFF, 0x1183, 0x11B7
BINARY_SIZES, BINARIES = 0x1165, 0x1166


def missing() -> str:
    """Why it is not there, or nothing."""
    folder = os.environ.get("LOWBIT_LEVEL_ZERO_OPENCL")
    if not folder:
        return "LOWBIT_LEVEL_ZERO_OPENCL names no folder with libintelocl.so"
    if not (runtime := Path(folder, "libintelocl.so")).exists():
        return f"{runtime} is not there"
    return "" if find_library("OpenCL") else "the system has no libOpenCL.so.1"


def runtime() -> Path:
    return Path(os.environ["LOWBIT_LEVEL_ZERO_OPENCL"], "libintelocl.so")


def kept_programs() -> Path:
    """The folder of programs that this runtime has compiled, on this processor."""
    facts = runtime().resolve().stat()
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return kept.folder("opencl", [], str(runtime()), facts.st_size, facts.st_mtime, flags)


class Machine:
    """The first device, a context and a queue."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as vendors:  # the one that is shipped has a placeholder in it
            Path(vendors, "intel.icd").write_text(f"{runtime()}\n")
            os.environ["OCL_ICD_VENDORS"] = vendors
            self._open()

    def _open(self) -> None:
        self.library = ctypes.CDLL("libOpenCL.so.1")
        for name in ("CreateContext", "CreateCommandQueue", "CreateProgramWithIL", "CreateProgramWithSource", "CreateProgramWithBinary", "LinkProgram", "CreateKernel"):
            getattr(self.library, f"cl{name}").restype = c_void_p
        platform, devices = c_void_p(), (c_void_p * 1)()
        self.call("GetPlatformIDs", c_uint32(1), byref(platform), None)
        self.call("GetDeviceIDs", platform, c_uint64(DEVICE_TYPE_ALL), c_uint32(1), devices, None)
        self.devices = devices
        self.context = self.make("CreateContext", None, c_uint32(1), devices, None, None)
        self.queue = self.make("CreateCommandQueue", self.context, c_void_p(devices[0]), c_uint64(0))

    def call(self, name: str, *arguments: object) -> None:
        error = getattr(self.library, f"cl{name}")(*arguments)
        if error:
            raise RuntimeError(f"cl{name}: {error}")

    def make(self, name: str, *arguments: object) -> c_void_p:
        error = c_int32()
        made = getattr(self.library, f"cl{name}")(*arguments, byref(error))
        if error.value:
            raise RuntimeError(f"cl{name}: {error.value}{self.log(c_void_p(made)) if made else ''}")
        return c_void_p(made)

    def log(self, program: c_void_p) -> str:
        text, device = ctypes.create_string_buffer(1 << 14), c_void_p(self.devices[0])
        self.library.clGetProgramBuildInfo(program, device, c_uint32(BUILD_LOG), c_size_t(len(text)), text, None)
        return f"\n{text.value.decode()}"

    def compiled(self, program: c_void_p) -> c_void_p:
        error = self.library.clCompileProgram(program, c_uint32(1), self.devices, b"-cl-std=CL2.0", c_uint32(0), None, None, None, None)
        if error:
            raise RuntimeError(f"clCompileProgram: {error}{self.log(program)}")
        return program

    @functools.cache  # noqa: B019: there is one machine
    def of_module(self, module: bytes) -> c_void_p:
        return self.compiled(self.make("CreateProgramWithIL", self.context, module, c_size_t(len(module))))

    @functools.cache  # noqa: B019
    def of_text(self, text: str) -> c_void_p:
        source = c_char_p(text.encode())
        return self.compiled(self.make("CreateProgramWithSource", self.context, c_uint32(1), byref(source), None))

    @functools.cache  # noqa: B019
    def program(self, module: bytes, *functions: str | bytes) -> c_void_p:
        """A module, linked with functions in OpenCL C or in other modules that it calls, or that call it."""
        texts = [part.encode() if isinstance(part, str) else part for part in (module, *functions)]
        path = kept_programs() / f"{hashlib.sha256(repr(texts).encode()).hexdigest()[:32]}.linked"
        if path.exists():
            return self.of_binary(path.read_bytes())
        parts = [self.of_module(module), *(self.of_text(part) if isinstance(part, str) else self.of_module(part) for part in functions)]
        array = (c_void_p * len(parts))(*parts)
        program = self.make("LinkProgram", self.context, c_uint32(1), self.devices, b"", c_uint32(len(parts)), array, None, None)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_bytes(self.binary_of(program))
        aside.rename(path)
        return program

    def binary_of(self, program: c_void_p) -> bytes:
        size = c_size_t()
        self.call("GetProgramInfo", program, c_uint32(BINARY_SIZES), c_size_t(8), byref(size), None)
        image = ctypes.create_string_buffer(size.value)
        self.call("GetProgramInfo", program, c_uint32(BINARIES), c_size_t(8), byref(c_void_p(ctypes.addressof(image))), None)
        return image.raw

    def of_binary(self, image: bytes) -> c_void_p:
        sizes, images, status = byref(c_size_t(len(image))), byref(c_char_p(image)), byref(c_int32())
        program = self.make("CreateProgramWithBinary", self.context, c_uint32(1), self.devices, sizes, images, status)
        self.call("BuildProgram", program, c_uint32(1), self.devices, b"", None, None)
        return program

    def launch(self, program: c_void_p, kernel: str, groups: int, threads: int, argument: bytes) -> None:
        """Runs a kernel that takes one struct, with addresses of this process in it, and waits for it."""
        made = self.make("CreateKernel", program, kernel.encode())
        self.call("SetKernelExecInfo", made, c_uint32(INDIRECT_ACCESS), c_size_t(4), byref(c_uint32(1)))
        self.call("SetKernelArg", made, c_uint32(0), c_size_t(len(argument)), argument)
        all_threads, of_group = c_size_t(groups * threads), c_size_t(threads)
        self.call("EnqueueNDRangeKernel", self.queue, made, c_uint32(1), None, byref(all_threads), byref(of_group), c_uint32(0), None, None)
        self.call("Finish", self.queue)
        self.call("ReleaseKernel", made)


@functools.cache
def machine() -> Machine:
    return Machine()
