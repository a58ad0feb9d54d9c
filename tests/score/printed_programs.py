# SPDX-License-Identifier: Apache-2.0
"""Printed score programs, compiled by g++ under a few lines that stand for a device, and called for every score.

An emulation of the language, not of a device: arithmetic, types and memory are what the text says, the C library is
this machine's.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from score_programs import K0, Q0, B, H
from torch import Tensor

from lowbit import _C

LANGUAGES = ("cuda", "opencl")
_DEVICE = {
    "cuda": """
#include <math.h>
#include <string.h>
#define __device__
#define __forceinline__ inline
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static unsigned int __float_as_uint(float a) { unsigned int bits; memcpy(&bits, &a, 4); return bits; }
static float __uint_as_float(unsigned int bits) { float a; memcpy(&a, &bits, 4); return a; }
template <class T> T __ldg(const T* p) { return *p; }
static int atomicExch(int* p, int value) { const int before = *p; *p = value; return before; }
static void atomicAdd(float* p, float value) { *p += value; }
""",
    "opencl": """
#include <cmath>
#include <cstring>
#define __global
using namespace std;
static unsigned int as_uint(float a) { unsigned int bits; memcpy(&bits, &a, 4); return bits; }
static float as_float(unsigned int bits) { float a; memcpy(&a, &bits, 4); return a; }
static int atomic_xchg(volatile int* p, int value) { const int before = *p; *p = value; return before; }
static unsigned int atomic_cmpxchg(volatile unsigned int* p, unsigned int wanted, unsigned int value) {
  const unsigned int before = *p;
  if (before == wanted) *p = value;
  return before;
}
""",
}
_ANY = "struct Any { void* p; template <class T> operator T*() const { return (T*)p; } };\n"

Program = tuple[list[int], Sequence[Tensor]]


def functions(program: Program, language: str, number: int) -> tuple[str, str]:
    """The prelude, and the functions of a program with a number after their names."""
    source = _C.score_program_source(program[0], [tensor.detach() for tensor in program[1]], language)
    at = source.index("DEVICE float score_mod" if "DEVICE float score_mod" in source else "DEVICE float mask_mod")
    return source[:at], re.sub(r"\b(score_mod_gradient|score_mod|mask_mod)\(", rf"\1_{number}(", source[at:])


class Printed:
    """Programs, printed in one language and compiled."""

    def __init__(self, programs: Sequence[Program], language: str, folder: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("printed programs are compiled by g++, which is not installed")
        self.programs, text = programs, ""
        for number, program in enumerate(programs):
            prelude, made = functions(program, language, number)
            text = (text or _DEVICE[language] + prelude + _ANY) + made + self._tile(number, program, made)
        source, library = folder / f"{language}.cpp", folder / f"{language}.so"
        source.write_text(text)
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-builtin", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True, timeout=300)
        self._library = ctypes.CDLL(str(library))

    @staticmethod
    def _tile(number: int, program: Program, made: str) -> str:
        """C that calls the printed functions for every score: `out` is modified scores, or the gradient of raw ones."""
        tensors = "".join(f"Any{{t[{i}]}}, " for i in range(len(program[1])))
        targets = "".join(f"Any{{d[{i}]}}, " for i, tensor in enumerate(program[1]) if tensor.is_floating_point())
        place, end = f"{B}, {H}, q0 + i / cols, k0 + i % cols, {tensors}", "Any{layout}, fault)"
        name = "mask_mod" if "DEVICE float mask_mod" in made else "score_mod"
        value = f"{name}_{number}(scores[i], {place}{end}"
        if name == "score_mod":
            value = f"gradient ? score_mod_gradient_{number}(scores[i], gradient[i], {place}{targets}{end} : {value}"
        return (
            f'extern "C" void tile_{number}(int count, int cols, int q0, int k0, const float* scores, '
            "const float* gradient, float* out, void** t, void** d, void* layout, int* fault) {\n"
            f"  for (int i = 0; i < count; i++) out[i] = {value};\n}}\n"
        )

    def run(
        self, number: int, scores: Tensor, gradient: Tensor | None = None, q0: int = Q0, k0: int = K0
    ) -> tuple[Tensor, list[Tensor | None], list[int]]:
        """Return the result, the gradients of the captured tensors that want one, and the fault."""
        captured = self.programs[number][1]
        scores, out, fault = scores.detach().contiguous(), torch.empty(scores.shape), (ctypes.c_int * 4)()
        sums = [
            torch.zeros(tensor.shape) if tensor.requires_grad and gradient is not None else None for tensor in captured
        ]
        layout = [number for tensor in captured for number in (*tensor.shape, *tensor.stride())]
        at = lambda tensors: (ctypes.c_void_p * max(len(tensors), 1))(
            *(None if t is None else t.data_ptr() for t in tensors)
        )  # noqa: E731
        pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (scores, gradient, out)]
        getattr(self._library, f"tile_{number}")(
            scores.numel(),
            scores.shape[1],
            q0,
            k0,
            *pointers,
            at(captured),
            at(sums),
            (ctypes.c_int64 * max(len(layout), 1))(*layout),
            fault,
        )
        return out, sums, list(fault)
