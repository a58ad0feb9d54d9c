# SPDX-License-Identifier: Apache-2.0
"""Programs printed as CUDA C and OpenCL C, and as SPIR-V, compute what the machine computes: ops, random programs,
tensors, faults.

Printed programs run compiled by g++ (printed_programs.py), SPIR-V on an OpenCL runtime (linked_programs.py): bit for
bit, but for the functions that the machine or the runtime has of its own. clang's OpenCL and NVRTC say whether texts are
the languages that they should be, where these compilers are.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
import torch
from linked_programs import Linked
from printed_programs import LANGUAGES, Printed, Program, functions
from score_programs import (
    FLOAT_ENDS,
    INT_ENDS,
    POSITIVE,
    alibi,
    causal,
    code_of,
    operands,
    relative_table,
    run,
    run_backward,
    softcap,
    tensors,
)
from tests.fuzz.choices import Choices
from tests.fuzz.ops import score_program as generator
from torch import Tensor

import lowbit
from lowbit import _C
from lowbit.reference.score_program import OPS
from lowbit.score.program import TYPES, ProgramBuilder

TARGETS = (*LANGUAGES, "spirv")
OWN = {"exp", "exp2", "tanh", "sigmoid", "scaled_tanh"}  # of the machine's own arithmetic, not of the C library
MATH = (Path(__file__).parents[2] / "csrc" / "score" / "math.hpp").read_text()
LIBRARY = set(re.findall(r"F\((\w+)\)", "".join(re.findall(r"^#define LOWBIT_LIBRARY\d\(F\)(.*)", MATH, re.MULTILINE)))) - {"fmod"}
"""Of the C library, but fmod, which is exact in any. Printed programs call the device's; 4 units in the last place, and
what the program makes of them."""


def made_for(target: str, programs: list[Program], folder: Path) -> Printed | Linked:
    return Linked(programs, folder) if target == "spirv" else Printed(programs, target, folder)


def exact(code: list[int], pass_: str, target: str) -> bool:
    own = OWN | LIBRARY if target == "spirv" else OWN
    return not own & set(re.findall(r"\w+", _C.score_program_explain(code)[pass_]))


def same(got: Tensor, wanted: Tensor, what: str, target: str) -> None:
    """Bit for bit, any nan for any other; of SPIR-V any zero: Intel's compiler makes (float)(int)-0.5 a trunc."""
    differs = (got.view(torch.int32) != wanted.view(torch.int32)) & ~(got.isnan() & wanted.isnan())
    if target == "spirv":
        differs &= got != wanted
    assert not differs.any(), f"{what}: {got[differs][:4].tolist()} is not {wanted[differs][:4].tolist()}"


def near(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(
        got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def op_at_the_ends(name: str) -> Program:
    """An op on every pair of special numbers, by captured tensors read per key."""
    types = _C.SCORE_OPS[name][1].partition(">")[0]
    ends = {"f": torch.tensor(FLOAT_ENDS[torch.float32]), "i": torch.tensor(INT_ENDS), "b": torch.tensor([False, True])}
    columns = torch.cartesian_prod(*(torch.arange(len(ends[letter])) for letter in types)).reshape(-1, len(types))
    program, captured = ProgramBuilder(), []
    for place, letter in enumerate(types):
        captured.append(ends[letter][columns[:, place]])
    if name in ("floor_divide_int", "remainder_int", "trunc_divide_int", "fmod_int"):
        keep = captured[1] != 0
        captured = [tensor[keep] for tensor in captured]
    values = [
        program.gather(program.captured(next(t for t in TYPES if t[0] == letter), 1), program.op("k"))
        for letter in types
    ]
    return program.finish(program.convert(program.op(name, *values), "float")), captured


Printeds = tuple[str, dict[str, tuple[Printed | Linked, int]]]


@pytest.fixture(scope="module", params=TARGETS)
def printed_ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Printeds:
    """Every op twice, at the ends and on plain numbers with its derivative, compiled together."""
    torch.manual_seed(1)
    programs = {f"{name} at the ends": op_at_the_ends(name) for name in OPS}
    for name in OPS:
        program, values, captured = operands(name, torch.float32)
        programs[name] = program.finish(program.convert(program.op(name, *values), "float")), captured
    made = made_for(request.param, list(programs.values()), tmp_path_factory.mktemp("printed"))
    return request.param, {name: (made, number) for number, name in enumerate(programs)}


@pytest.mark.parametrize("name", sorted(OPS))
def test_printed_op_is_that_of_the_machine(printed_ops: Printeds, name: str) -> None:
    target, ops = printed_ops
    printed, number = ops[f"{name} at the ends"]
    code, captured = printed.programs[number]
    scores = torch.randn(1, len(captured[0]))
    got, _, fault = printed.run(number, scores, q0=0, k0=0)
    wanted = run(code, list(captured), scores, q0=0, k0=0)
    assert fault == [0, 0, 0, 0]
    if exact(code, "forward", target):
        same(got, wanted, name, target)
    else:
        near(got, wanted, 4 * 2.0**-23, name)


@pytest.mark.parametrize("name", sorted(OPS))
def test_printed_derivative_is_that_of_the_machine(printed_ops: Printeds, name: str) -> None:
    target, ops = printed_ops
    printed, number = ops[name]
    code, captured = printed.programs[number]
    scores, gradient = torch.randn(19, 33) * 3, torch.randn(19, 33)
    if name in POSITIVE:
        scores = scores.abs() + 0.1
    got, sums, fault = printed.run(number, scores, gradient)
    wanted, wanted_sums = run_backward(code, list(captured), scores, gradient)
    assert fault == [0, 0, 0, 0]
    if exact(code, "backward", target):
        same(got, wanted, name, target)
    else:
        near(got, wanted, 2e-5, name)
    for sum, wanted_sum in zip(sums, wanted_sums, strict=True):  # each element of these tensors is read by one score
        if sum is not None:
            near(sum, wanted_sum, 2e-5, name)


@functools.cache
def random_programs(seeds: range) -> list[tuple[Program, bool]]:
    """Of the fuzzer; and whether each has ops that jump, so that a last bit may become any other number."""
    made = []
    for seed in seeds:
        code, texts, jumps = generator.random_program(Choices(seed), (2, 3, 20 + 5, 40 + 3))
        torch.manual_seed(seed)
        captured = [eval(text, {"torch": torch}) for text in texts]
        made.append(((code, [t.requires_grad_() if t.is_floating_point() else t for t in captured]), jumps))
    return made


@pytest.mark.parametrize("target", TARGETS)
def test_printed_random_programs_are_those_of_the_machine(target: str, tmp_path: Path) -> None:
    assert compare_random_programs(target, range(150), tmp_path) > 200


def compare_random_programs(target: str, seeds: range, folder: Path) -> int:
    """Return how many functions were compared. 10,000 programs, once: seeds in steps of 150."""
    programs = random_programs(seeds)
    printed = made_for(target, [program for program, _ in programs], folder)
    compared = 0
    for number, ((code, captured), jumps) in enumerate(programs):
        scores, gradient = torch.randn(20, 40), torch.randn(20, 40)
        is_mask = _C.score_program_explain(code)["is_mask"]
        for pass_ in ("forward",) if is_mask else ("forward", "backward"):
            got, sums, fault = printed.run(number, scores, None if pass_ == "forward" else gradient, q0=5, k0=3)
            try:
                if pass_ == "forward":
                    wanted, wanted_sums = run(code, list(captured), scores, q0=5, k0=3), []
                else:
                    wanted, wanted_sums = run_backward(code, list(captured), scores, gradient, q0=5, k0=3)
            except RuntimeError as error:  # what a seed makes of a list of ops that has grown may divide by zero
                assert "divides an integer by zero" in str(error) and fault[0] != 0
                break
            assert fault[0] == 0
            if exact(code, pass_, target):
                same(got, wanted, f"program {number} {pass_}", target)
            elif not jumps:
                near(got, wanted, 2e-4, f"program {number} {pass_}")
            else:
                continue
            compared += 1
            for sum, wanted_sum in zip(sums, wanted_sums, strict=False):
                finite = wanted_sum is not None and wanted_sum.isfinite().all() and wanted_sum.abs().max() < 1e6
                if finite and not jumps:  # another order of additions
                    near(
                        sum,
                        wanted_sum,
                        1e-3 * (1 + float(wanted_sum.abs().max())),
                        f"program {number}, a captured tensor",
                    )
    return compared


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.bool],
    ids=str,
)
def test_printed_program_reads_tensors_of_any_dtype_and_layout(
    target: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every 16-bit float; ranks 0 and 3; steps, stride 0, negative indices."""
    if dtype in (torch.bfloat16, torch.float16):
        table = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 1, 256)
    else:
        table = (torch.randn(256, 1, 256, dtype=torch.float64) * 9).to(dtype)
    table = table.transpose(0, 2).expand(256, 3, 256)
    number = torch.tensor(3).to(dtype)
    type = "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"
    program = ProgramBuilder()
    cell = program.gather(
        program.captured(type, 3), program.op("neg", program.op("q")), program.op("h"), program.op("k")
    )
    scalar = program.gather(program.captured(type, 0))
    code = program.finish(program.op("add", program.convert(cell, "float"), program.convert(scalar, "float")))
    captured, scores = [table, number], torch.randn(256, 256)
    got, _, fault = made_for(target, [(code, captured)], tmp_path).run(0, scores, q0=0, k0=0)
    assert fault[0] == 0
    same(got, run(code, captured, scores, q0=0, k0=0), str(dtype), target)


@pytest.mark.parametrize("target", TARGETS)
def test_printed_program_rounds_doubles_to_the_nearest_float(target: str, tmp_path: Path) -> None:
    """Ties, subnormal numbers and what is none, overflow: SPIR-V does it in integers."""
    least, most = 2.0**-149, 2.0**128 - 2.0**104
    doubles = [1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-52, 1 + 3 * 2.0**-24, 2 - 2.0**-25, 2.0**-126 - 2.0**-150, 2.0**-126, 1 / 3]
    doubles += [least, least / 2, least * (0.5 + 2.0**-52), least * 1.5, least * 2.5, least / 4, 5e-324, 2.0**-1022, 0.0, 1e-40 / 3]
    doubles += [most, most + 2.0**102, most + 2.0**103, 1e300, float("inf"), float("nan")]
    captured = [torch.tensor([*doubles, *(-double for double in doubles)], dtype=torch.float64)]
    program = ProgramBuilder()
    code = program.finish(program.gather(program.captured("float", 1), program.op("k")))
    scores = torch.randn(1, len(captured[0]))
    got, _, _ = made_for(target, [(code, captured)], tmp_path).run(0, scores, q0=0, k0=0)
    same(got, captured[0].float()[None], "doubles", target)


@pytest.mark.parametrize("target", TARGETS)
def test_printed_program_notes_an_index_out_of_range_and_reads_nothing(target: str, tmp_path: Path) -> None:
    program = ProgramBuilder()
    ids = program.gather(program.captured("int", 1), program.op("k"))
    code = program.finish(program.gather(program.captured("float", 2), program.op("h"), ids))
    captured = [torch.tensor([0, 1, 5, 1]), torch.randn(3, 4)]
    _, _, fault = made_for(target, [(code, captured)], tmp_path).run(0, torch.randn(1, 4), q0=0, k0=0)
    assert fault == [1, 1, 1, 5]
    with pytest.raises(IndexError, match="reads index 5 of dimension 1 of captured tensor 1"):
        run(code, captured, torch.randn(1, 4), q0=0, k0=0)


@pytest.mark.parametrize("target", TARGETS)
def test_printed_program_notes_a_division_of_integers_by_zero(target: str, tmp_path: Path) -> None:
    program = ProgramBuilder()
    quotient = program.op("floor_divide", program.op("q"), program.op("sub", program.op("k"), program.constant(2)))
    code = program.finish(program.convert(quotient, "float"))
    printed = made_for(target, [(code, [])], tmp_path)
    assert printed.run(0, torch.randn(3, 2), q0=0, k0=0)[2] == [0, 0, 0, 0]
    assert printed.run(0, torch.randn(3, 4), q0=0, k0=0)[2][:2] == [1, -1]


def everything(language: str) -> str:
    """One source file with every op, its derivative, gathers of every dtype and programs of users."""
    programs: list[Program] = []
    for name in sorted(OPS):
        program, values, captured = operands(name, torch.float32)
        programs.append((program.finish(program.convert(program.op(name, *values), "float")), captured))
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int32):
        program = ProgramBuilder()
        cell = program.gather(
            program.captured("int" if dtype == torch.int32 else "float", 2), program.op("h"), program.op("k")
        )
        programs.append((program.finish(program.convert(cell, "float")), [torch.ones(3, 4).to(dtype)]))
    programs += [(code_of(build), tensors(build, torch.float32)) for build in (alibi, relative_table, softcap)]
    programs.append((code_of(causal), []))
    text = ""
    for number, program in enumerate(programs):
        prelude, made = functions(program, language, number)
        text = (text or prelude) + made
    return text


def test_printed_opencl_is_opencl(tmp_path: Path) -> None:
    clang = next(
        (path for name in ("clang", *(f"clang-{n}" for n in range(22, 12, -1))) if (path := shutil.which(name))), None
    )
    if clang is None:
        pytest.skip("no clang on this machine: it is asked whether the text is OpenCL C")
    source = tmp_path / "programs.cl"
    source.write_text("#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n" + everything("opencl"))
    for standard in ("CL1.2", "CL3.0"):
        flags = [
            "-x",
            "cl",
            f"-cl-std={standard}",
            "-Xclang",
            "-finclude-default-header",
            "-target",
            "spir64",
            "-fsyntax-only",
            "-Wall",
            "-Werror",
        ]
        done = subprocess.run(
            [clang, *flags, "-Wno-unused-function", "-Wno-unused-variable", str(source)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[:4000]


def nvrtc() -> ctypes.CDLL:
    """The compiler of CUDA C: of the package nvidia-cuda-nvrtc beside this Python, or of the system."""
    found = [path for folder in sys.path for path in Path(folder).glob("nvidia/*/lib/libnvrtc.so*")]
    name = str(found[0]) if found else find_library("nvrtc")
    if name is None:
        pytest.skip("no NVRTC on this machine (pip install nvidia-cuda-nvrtc): it is asked whether the text is CUDA C")
    return ctypes.CDLL(name)


def ptx_of(source: str) -> str:
    library, program = nvrtc(), ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"programs.cu", 0, None, None) == 0
    options = [b"--gpu-architecture=compute_80", b"--fmad=true"]
    failed = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    get = "ProgramLog" if failed else "PTX"
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{get}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{get}")(program, text)
    assert not failed, text.value.decode()[:4000]
    return text.value.decode()


def test_printed_cuda_is_cuda() -> None:
    text = everything("cuda")
    calls = re.findall(r"DEVICE float (\w+)\(([^)]*)\)", text)
    kernels = ""
    for name, parameters in calls:
        if name.startswith(("score_mod", "mask_mod")):  # a call from a kernel, so that each is compiled to the end
            names = ", ".join(parameter.rpartition(" ")[2].lstrip("*") for parameter in parameters.split(", "))
            kernels += (
                f'extern "C" __global__ void run_{name}(float* out, {parameters}) {{ *out = {name}({names}); }}\n'
            )
    ptx = ptx_of(text + kernels)
    assert ptx.count(".entry run_") == kernels.count("__global__") > 150


def test_printed_cuda_is_not_contracted() -> None:
    """(q / 49)^2 - k: the machine divides and rounds the product; NVRTC, asked for multiply-adds, does too."""
    program = ProgramBuilder()
    ratio = program.op("div", program.convert(program.op("q"), "float"), program.constant(49.0))
    code = program.finish(program.op("sub", program.op("mul", ratio, ratio), program.convert(program.op("k"), "float")))
    source = _C.score_program_source(code, [], "cuda")
    call = "score_mod(0.0f, 0, 0, q, k, nullptr, nullptr)"
    kernel = f'extern "C" __global__ void run(float* out, int q, int k) {{ *out = {call}; }}\n'
    ptx = ptx_of(source + kernel)
    assert "fma." not in ptx and "div.rn.f32" in ptx and "mul.rn.f32" in ptx and "sub.rn.f32" in ptx


def test_explain_prints_the_source_of_a_mod() -> None:
    table = torch.randn(3, 4)
    explained = lowbit.explain(lambda score, b, h, q, k: score * 2 + table[h, k % 4])
    for language in LANGUAGES:
        source = explained.source(language)
        assert source.count("DEVICE float score_mod(") == source.count("DEVICE float score_mod_gradient(") == 1
        assert source == explained.source(language)
    assert "__ldg" in explained.source("cuda") and "__global" in explained.source("opencl")
    mask = lowbit.explain(lambda b, h, q, k: q >= k, q_len=256).source("opencl")
    assert "DEVICE float mask_mod(" in mask and "score_mod" not in mask
    with pytest.raises(ValueError, match="language must be cuda or opencl, got metal"):
        explained.source("metal")
    with pytest.raises(ValueError, match="has no program, it changes nothing"):
        lowbit.explain(lambda score, b, h, q, k: score).source("cuda")
    with pytest.raises(ValueError, match="has no program, it runs through torch: aten.lgamma"):
        lowbit.explain(lambda score, b, h, q, k: torch.lgamma(score)).source("cuda")
