# SPDX-License-Identifier: Apache-2.0
"""Score programs as SPIR-V, linked to a kernel of OpenCL C that calls them for every score: as printed_programs.py."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from printed_programs import Program
from score_programs import K0, Q0, B, H
from tests import internals
from tests.level_zero import opencl
from torch import Tensor

from lowbit import _C

SCORE_ADD = """
void score_add(__global const ulong* captured, int tensor, long at, uint value) {
  __global const ulong* gradients = (__global const ulong*)captured[0] + 2;  // behind the fault
  volatile __global uint* to = (volatile __global uint*)gradients[tensor];
  if (!to || at == LONG_MIN) return;
  uint before = to[at], wanted;
  do {
    wanted = before;
    before = atomic_cmpxchg(to + at, wanted, as_uint(as_float(wanted) + as_float(value)));
  } while (before != wanted);
}
"""
"""Names of a kernel that adds gradients of captured tensors up."""
CAPABILITIES = {"Addresses", "Linkage", "Kernel", "Int64"}


def validate(words: bytes, folder: Path) -> None:
    """By Khronos' validator and disassembler, where they are: capabilities are those that every driver has."""
    if shutil.which("spirv-val") is None:
        return
    path = folder / "programs.spv"
    path.write_bytes(words)
    done = subprocess.run(["spirv-val", "--target-env", "opencl2.2", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = subprocess.run(["spirv-dis", str(path)], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "; Version: 1.2\n" in text
    assert {line.split()[1] for line in text.splitlines() if "OpCapability" in line} <= CAPABILITIES


class Linked:
    """Programs in one module, linked."""

    def __init__(self, programs: Sequence[Program], folder: Path) -> None:
        if reason := opencl.missing():
            pytest.skip(reason)
        if reason := _C.level_zero.modules_missing():
            pytest.skip(reason)
        self.programs, functions = programs, []
        text = SCORE_ADD + "typedef struct { ulong scores, gradient, out, captured; int cols, q0, k0; } Call;\n"
        for number, (code, captured) in enumerate(programs):
            tensors, is_mask = [tensor.detach() for tensor in captured], _C.score_program_explain(code)["is_mask"]
            for gradient in (False,) if is_mask else (False, True):
                name = f"{'gradient' if gradient else 'mod'}_{number}"
                functions.append((name, code, tensors, gradient))
                given = "scores[i], gradient[i]" if gradient else "scores[i]"
                text += (
                    f"float {name}(float, {'float, ' * gradient}int, int, int, int, __global const ulong*);\n"
                    f"__kernel void run_{name}(const Call c) {{\n"
                    "  __global const float *scores = (__global const float*)c.scores, *gradient = (__global const float*)c.gradient;\n"
                    "  const int i = get_global_id(0);\n"
                    f"  ((__global float*)c.out)[i] = {name}({given}, {B}, {H}, c.q0 + i / c.cols, c.k0 + i % c.cols, "
                    "(__global const ulong*)c.captured);\n}\n"
                )
        words = internals.score_programs_spirv(functions, sums=True)
        validate(words, folder)
        self.program = opencl.machine().program(words, _C.level_zero.module("score_ops"), text)

    def run(
        self, number: int, scores: Tensor, gradient: Tensor | None = None, q0: int = Q0, k0: int = K0
    ) -> tuple[Tensor, list[Tensor | None], list[int]]:
        """Return the result, the gradients of the captured tensors that want one, and the fault."""
        captured = self.programs[number][1]
        scores, out = scores.detach().contiguous(), torch.empty(scores.shape)
        sums = [torch.zeros(t.shape) if t.requires_grad and gradient is not None else None for t in captured]
        layout = [number for tensor in captured for number in (*tensor.shape, *tensor.stride())]
        at = lambda tensor: 0 if tensor is None else tensor.data_ptr()  # noqa: E731
        fault = torch.tensor([0, 0, *map(at, sums)])
        table = torch.tensor([at(fault), *map(at, captured), *layout])
        argument = struct.pack("<4Q3i4x", *map(at, (scores, gradient, out, table)), scores.shape[1], q0, k0)
        opencl.machine().launch(self.program, f"run_{'mod' if gradient is None else 'gradient'}_{number}", scores.numel(), 1, argument)
        return out, sums, fault[:2].view(torch.int32).tolist()
