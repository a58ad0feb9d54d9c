# SPDX-License-Identifier: Apache-2.0
"""Ops on 64-bit Arm against float64, under qemu: what tools/arm compiled, in the Python that it laid out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import cross_built
import pytest

ROOT = Path(__file__).parents[2]
# A share of the core tests that takes a minute of one core each; an import of torch takes half of that. Not a Cortex-A53,
# as for programs of C: torch's wheel ends by an illegal instruction there.
SHARE = {
    "neon": ("neoverse-n1", "tests/ops/test_rms_norm.py", "_neon and not _neon_dot"),
    "neon_dot": ("neoverse-n1", "tests/ops/test_linear.py", "linear_int4_int8_neon_dot"),
    "neon_i8mm": ("max", "tests/ops/test_linear.py", "linear_int4_int8_neon_i8mm"),
    "neon_bf16": ("max", "tests/ops/test_linear.py", "linear_int8_neon_bf16"),
}


def compiled_for_arm(program: Path) -> list[str]:
    """The command that runs tests/cpp/isa.cpp with csrc/core/isa.cpp under qemu, without `-cpu`."""
    compiler, qemu = shutil.which("aarch64-linux-gnu-g++-12"), shutil.which("qemu-aarch64-static")
    if compiler is None or qemu is None:
        pytest.skip("no aarch64-linux-gnu-g++-12 or no qemu-aarch64-static on this machine: tools/test_env")
    core = [ROOT / f"csrc/core/{name}.cpp" for name in ("isa", "error", "os/posix", "os/linux")]
    sources = [ROOT / "tests/cpp/isa.cpp", *core]
    subprocess.run([compiler, "-std=c++20", "-O0", f"-I{ROOT / 'csrc'}", "-static", *sources, "-o", program], check=True)
    return [qemu, str(program)]


def test_the_instruction_set_is_the_best_that_the_processor_has_and_lowbit_isa_allows(tmp_path: Path) -> None:
    qemu, program = compiled_for_arm(tmp_path / "isa")

    def says(processor: str, limit: str) -> str:
        command = [qemu, "-cpu", processor, "-E", f"LOWBIT_ISA={limit}", program]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert says("max", "") == "neon_bf16 neon_bf16"
    assert says("neoverse-n1", "") == "neon_dot neon_dot"
    assert says("cortex-a53", "") == "neon neon"
    assert says("max", "neon_i8mm") == "neon_bf16 neon_i8mm LOWBIT_ISA=neon_i8mm lowers it from neon_bf16"
    assert says("max", "scalar") == "neon_bf16 scalar LOWBIT_ISA=scalar lowers it from neon_bf16"
    assert says("neoverse-n1", "neon_bf16") == "neon_dot neon_dot LOWBIT_ISA=neon_bf16 cannot raise it above neon_dot"
    assert "must be one of neon_bf16, neon_i8mm, neon_dot, neon, scalar, got 'avx2'" in says("max", "avx2")


@pytest.mark.parametrize("isa", SHARE)
def test_ops_are_within_budget_of_float64_under_qemu(isa: str) -> None:
    cross_built.skip_without("arm/python/lowbit/liblowbit.so", "arm")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOWBIT_", "PYTEST_"))}
    processor, file, names = SHARE[isa]
    environment |= {"LOWBIT_ISA": isa, "QEMU_CPU": processor}
    cross_built.run_tests("arm_python", file, names, environment)


def test_a_c_program_writes_the_bytes_of_x86() -> None:
    cross_built.skip_without("arm/csrc/liblowbit.so", "arm")
    done = subprocess.run([ROOT / "tools/arm", "--objects"], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("no aarch64-linux-gnu-g++-12 or no qemu-aarch64-static on this machine: tools/test_env")
    assert done.returncode == 0 and done.stdout.count("the bytes of x86-64") == 7, done.stdout + done.stderr
