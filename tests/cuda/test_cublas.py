# SPDX-License-Identifier: Apache-2.0
"""Our declarations of cuBLASLt against its headers, where they are; what it computes is tested by check_linear.py, emulated."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "csrc/cuda/cublas/matmul.cpp"
FOLDERS = [path for entry in sys.path for path in Path(entry).glob("nvidia/*/include")]
CHECKS = """
#include <cublasLt.h>
#define IS(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #ours)
IS(kTransposeA, CUBLASLT_MATMUL_DESC_TRANSA);
IS(kMaxWorkspace, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
IS(kReductions, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
IS(kAlignmentOfA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
IS(kAlignmentOfB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
IS(kAlignmentOfC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
IS(kAlignmentOfD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
IS(kTransposed, CUBLAS_OP_T);
IS(kSumsInFloat32, CUBLAS_COMPUTE_32F);
IS(kReal32, CUDA_R_32F);
IS(kReal16, CUDA_R_16F);
IS(kSumsInInt32, CUBLAS_COMPUTE_32I);
IS(kInteger8, CUDA_R_8I);
IS(kInteger32, CUDA_R_32I);
IS(kRealBfloat16, CUDA_R_16BF);
IS(kReducedIn32Bits, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
static_assert(sizeof(Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(Heuristic, workspace) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(Heuristic, status) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(std::array<uint64_t, 8>));
"""


def test_declarations_are_those_of_the_headers(tmp_path: Path) -> None:
    if not any((folder / "cublasLt.h").exists() and (folder / "cuda_runtime.h").exists() for folder in FOLDERS) or shutil.which("g++") is None:
        pytest.skip("no headers of cuBLAS and the CUDA runtime beside this Python (tools/cudnn_headers), or no g++")
    text = SOURCE.read_text()
    ours = text[text.index("enum { kTransposeA") : text.index("#define LOWBIT_CUBLAS_LT")]
    functions = re.findall(r'X\((\w+), "(cublasLt\w+)"', text)
    assert len(functions) >= 10
    addresses = "".join(f"auto* address_of_{name} = &{function};\n" for name, function in functions)
    source = tmp_path / "checks.cpp"
    source.write_text("#include <array>\n#include <cstddef>\n#include <cstdint>\n" + ours + CHECKS + addresses)
    includes = [f"-I{folder}" for folder in FOLDERS]
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", *includes, str(source)], check=True)
