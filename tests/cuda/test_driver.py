# SPDX-License-Identifier: Apache-2.0
"""Our declarations of libcuda against its header, where it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADERS = [path for entry in sys.path for path in Path(entry).glob("nvidia/*/include/cuda.h")]
CHECKS = """
#include <cuda.h>
#include "cuda/runtime/driver.hpp"
using namespace lowbit::cuda;
#define IS(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #ours)
IS(kMultiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
IS(kComputeMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
IS(kComputeMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
IS(kMaxSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
IS(kBeginsEarly.id, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
IS(sizeof(LaunchAttribute), sizeof(CUlaunchAttribute));
IS(offsetof(LaunchAttribute, value), offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed));
IS(sizeof(Launch), sizeof(CUlaunchConfig));
IS(offsetof(Launch, grid), offsetof(CUlaunchConfig, gridDimX));
IS(offsetof(Launch, block), offsetof(CUlaunchConfig, blockDimX));
IS(offsetof(Launch, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
IS(offsetof(Launch, stream), offsetof(CUlaunchConfig, hStream));
IS(offsetof(Launch, attributes), offsetof(CUlaunchConfig, attrs));
IS(offsetof(Launch, count), offsetof(CUlaunchConfig, numAttrs));
"""


def test_declarations_are_those_of_the_header(tmp_path: Path) -> None:
    if not HEADERS or shutil.which("g++") is None:
        pytest.skip("no headers of cuBLAS and the CUDA runtime beside this Python (tools/cudnn_headers), or no g++")
    source = tmp_path / "checks.cpp"
    source.write_text(CHECKS)
    includes = [f"-I{HEADERS[0].parent}", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", *includes, str(source)], check=True)
