# SPDX-License-Identifier: Apache-2.0
"""A CPU's OpenCL runtime that takes SPIR-V (Intel's), by ctypes: programs are compiled, linked, and run on memory of
this process."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_CPU, _PROGRAM_BUILD_LOG = 2, 0x1183
Pointer = ctypes.c_void_p


class OpenClError(RuntimeError):
    pass


def _runtime() -> Path | None:
    """libintelocl.so of `pip install intel-opencl-rt intel-cmplr-lib-rt`, in this environment or LOWBIT_TEST_OPENCL."""
    folders = [os.environ.get("LOWBIT_TEST_OPENCL"), Path(sys.prefix) / "lib"]
    return next((path for folder in folders if folder and (path := Path(folder) / "libintelocl.so").is_file()), None)


@functools.cache
def device() -> Device:
    path = _runtime()
    if path is None:
        pytest.skip("no OpenCL runtime that takes SPIR-V (pip install intel-opencl-rt, or LOWBIT_TEST_OPENCL=its folder)")
    return Device(path)


class Device:
    def __init__(self, runtime: Path) -> None:
        self.library = ctypes.CDLL(str(runtime))
        platform, self.device = Pointer(), Pointer()
        self._call("clGetPlatformIDs", 1, ctypes.byref(platform), None)
        self._call("clGetDeviceIDs", platform, ctypes.c_uint64(_CPU), 1, ctypes.byref(self.device), None)
        self.context = self._made("clCreateContext", None, 1, ctypes.byref(self.device), None, None)
        self.queue = self._made("clCreateCommandQueue", self.context, self.device, ctypes.c_uint64(0))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise OpenClError(f"{name}: {code}")

    def _made(self, name: str, *arguments: object) -> ctypes.c_void_p:
        function, code = getattr(self.library, name), ctypes.c_int()
        function.restype = Pointer
        made = Pointer(function(*arguments, ctypes.byref(code)))
        if code.value:
            raise OpenClError(f"{name}: {code.value}")
        return made

    def _log(self, program: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(1 << 16)
        self._call("clGetProgramBuildInfo", program, self.device, _PROGRAM_BUILD_LOG, ctypes.c_size_t(len(text)), text, None)
        return text.value.decode()

    def compiled(self, code: bytes | str, options: bytes = b"") -> ctypes.c_void_p:
        """SPIR-V, or OpenCL C."""
        if isinstance(code, bytes):
            program = self._made("clCreateProgramWithIL", self.context, code, ctypes.c_size_t(len(code)))
        else:
            text = ctypes.c_char_p(code.encode())
            program = self._made("clCreateProgramWithSource", self.context, 1, ctypes.byref(text), None)
        if self.library.clCompileProgram(program, 1, ctypes.byref(self.device), options, 0, None, None, None, None):
            raise OpenClError(self._log(program))
        return program

    def linked(self, programs: Sequence[ctypes.c_void_p]) -> ctypes.c_void_p:
        array = (Pointer * len(programs))(*programs)
        return self._made("clLinkProgram", self.context, 1, ctypes.byref(self.device), b"", len(programs), array, None, None)

    def run(self, program: ctypes.c_void_p, kernel: str, count: int, arguments: Sequence[ctypes._SimpleCData[int]]) -> None:
        """Wait for `count` work items."""
        made = self._made("clCreateKernel", program, kernel.encode())
        for place, argument in enumerate(arguments):
            self._call("clSetKernelArg", made, place, ctypes.c_size_t(ctypes.sizeof(argument)), ctypes.byref(argument))
        size = ctypes.c_size_t(count)
        self._call("clEnqueueNDRangeKernel", self.queue, made, 1, None, ctypes.byref(size), None, 0, None, None)
        self._call("clFinish", self.queue)
        self._call("clReleaseKernel", made)

    def release(self, *programs: ctypes.c_void_p) -> None:
        for program in programs:
            self._call("clReleaseProgram", program)
