# SPDX-License-Identifier: Apache-2.0
"""lowbit/backend.h is C99 and C++, and reads every packed weight."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lowbit import _C, backends, testing

SOURCE = """
#include <lowbit/backend.h>
LOWBIT_BACKEND_EXPORT void decode(const lowbit_weight *weight, double *codes, double *factors) {
  int64_t n, k;
  for (n = 0; n < weight->n; n++)
    for (k = 0; k < weight->k; k++) {
      *codes++ = lowbit_code(weight, n, k) - lowbit_zero(weight, n, k);
      *factors++ = lowbit_scale(weight, n, k);
    }
}
"""


@pytest.mark.parametrize("compiler, standard", [("gcc", "c99"), ("gcc", "c17"), ("g++", "c++11"), ("g++", "c++20")])
def test_header_is_c_and_cpp(compiler: str, standard: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this machine")
    source = tmp_path / ("rows.c" if compiler == "gcc" else "rows.cpp")
    source.write_text(SOURCE)
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{backends.include_dir()}"]
    subprocess.run([compiler, *flags, "-fsyntax-only", str(source)], check=True)


class Weight(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_int64) for name in ("rows", "row_bytes", "columns", "n", "k", "group_size")]
    _fields_ += [(name, ctypes.c_int64) for name in ("column_scale", "column_sum", "group_scale", "zero", "codes")]
    _fields_ += [(name, ctypes.c_int32) for name in ("format", "layout", "bits", "asymmetric")]


def test_header_reads_every_integer_format(tmp_path: Path, subtests: pytest.Subtests) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on this machine")
    (tmp_path / "decode.c").write_text(SOURCE)
    library = tmp_path / "decode.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", f"-I{backends.include_dir()}", str(tmp_path / "decode.c"), "-o", str(library)], check=True)
    decode, n, k = ctypes.CDLL(str(library)).decode, 37, 100
    for format in testing.formats_of_kind("integer"):
        for group_size, mapping in ((0, "symmetric"), (32, "symmetric"), (0, "asymmetric"), (32, "asymmetric")):
            with subtests.test(format=format, group_size=group_size, mapping=mapping):
                packed = testing.pack_weight(torch.randn(n, k), format, group_size, mapping)
                reference = testing.decode_weight(packed, n, k, format, group_size, mapping)
                groups, asymmetric = -(-k // group_size) if group_size else 1, mapping == "asymmetric"
                scales = 128 + (groups * 32 + 63) // 64 * 64 * (group_size > 0)
                codes = scales + (groups * 32 + 63) // 64 * 64 * asymmetric
                weight = Weight(packed.data_ptr(), *packed.shape, 16, n, k, group_size, 0, 64, 128 if group_size else -1,
                                scales if asymmetric else -1, codes, _C.FORMATS[format], 0, _C.FORMAT_FACTS[format]["bits"], asymmetric)  # fmt: skip
                levels, factors = torch.empty(n, k, dtype=torch.float64), torch.empty(n, k, dtype=torch.float64)
                decode(ctypes.byref(weight), ctypes.c_void_p(levels.data_ptr()), ctypes.c_void_p(factors.data_ptr()))
                torch.testing.assert_close(levels * factors, reference.decode(), rtol=1e-6, atol=0)
