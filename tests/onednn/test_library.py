# SPDX-License-Identifier: Apache-2.0
"""Libraries that are not there, broken, of another version, without a symbol, with other threads, or that fail: each is
a reason in words, and the other rows run. The libraries are fakes of a few lines of C."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONS = re.findall(r'"(dnnl_\w+)"', (ROOT / "csrc" / "onednn" / "api.hpp").read_text())
OPENMP = ("omp_set_num_threads", "omp_get_max_threads", "omp_in_parallel")
SEQUENTIAL, WITH_OPENMP, TBB, THREAD_POOL, SYCL = 1, 2, 4, 8, 512

# Without torch, which takes a second to import and is not asked for anything here.
FACTS = """
import sys
sys.modules["torch"] = None
import lowbit
from lowbit import _C
for name in ("path", "version", "reason"):
    print(_C.onednn.facts()[name])
rows = {row["name"]: row for row in _C.kernels("linear")}
print({rows[name]["reason"] for name in rows if name.endswith("_onednn")} == {_C.onednn.facts()["reason"]})
print(any(row["available"] for row in rows.values()))
"""


# Numbers of csrc/onednn/api.hpp, by oneDNN's names.
NUMBERS = {
    "kCpu": "dnnl_cpu", "kInOrder": "dnnl_stream_in_order", "kUserScratchpad": "dnnl_scratchpad_mode_user",
    "kStrictMath": "dnnl_fpmath_mode_strict", 
    "kOutOfMemory": "dnnl_out_of_memory", "kUnimplemented": "dnnl_unimplemented",
    "kFloat32": "dnnl_f32", 
    "kPanels16a16b": "dnnl_BA16a16b",
    "kGeluTanh": "dnnl_eltwise_gelu_tanh", "kSwish": "dnnl_eltwise_swish", "kBinaryAdd": "dnnl_binary_add", "kBinaryMul": "dnnl_binary_mul",
    "kQueryImplementation": "dnnl_query_impl_info_str", "kQueryInnerCount": "dnnl_query_inner_nblks_s32",
    "kQueryInnerBlocks": "dnnl_query_inner_blks", "kQueryInnerDims": "dnnl_query_inner_idxs",
    "kQueryScratchpad": "dnnl_query_scratchpad_md",
    "kSource": "DNNL_ARG_SRC", "kDestination": "DNNL_ARG_DST", "kWeights": "DNNL_ARG_WEIGHTS", "kScratchpad": "DNNL_ARG_SCRATCHPAD",
    "argument_of_post_op(2)": "DNNL_ARG_ATTR_MULTIPLE_POST_OP(2) | DNNL_ARG_SRC_1",
    "kSequential": "DNNL_RUNTIME_SEQ", "kOpenMP": "DNNL_RUNTIME_OMP", "kTbb": "DNNL_RUNTIME_TBB",
    "kThreadPool": "DNNL_RUNTIME_THREADPOOL", "kSycl": "DNNL_RUNTIME_SYCL",
    "sizeof(Argument)": "sizeof(dnnl_exec_arg_t)", "sizeof(Version)": "sizeof(dnnl_version_t)",
}  # fmt: skip


def test_numbers_are_those_of_the_headers(tmp_path: Path) -> None:
    """torch's wheel has the headers of the oneDNN that it contains."""
    torch = importlib.util.find_spec("torch")
    include = Path(str(torch and torch.origin)).parent / "include"
    if shutil.which("g++") is None or not (include / "oneapi" / "dnnl" / "dnnl.h").exists():
        pytest.skip("no g++ on this machine, or no headers of oneDNN in torch")
    api = (ROOT / "csrc" / "onednn" / "api.hpp").read_text()
    assert set(re.findall(r"\b(k[A-Z]\w*) =", api)) == {name for name in NUMBERS if name.startswith("k")}
    checks = [f'static_assert((long)(lowbit::onednn::{ours}) == (long)({theirs}), "{theirs}");' for ours, theirs in NUMBERS.items()]
    text = "\n".join(checks).replace("lowbit::onednn::sizeof(", "sizeof(lowbit::onednn::")
    (tmp_path / "numbers.cpp").write_text(f'#include "oneapi/dnnl/dnnl.h"\n#include "onednn/api.hpp"\n{text}\n')
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{ROOT / 'csrc'}", str(tmp_path / "numbers.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Compiles a libdnnl.so.3 of this version and runtime, all of whose functions return 0, but for what is given."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on this machine: the fake library is C")

    def make(
        version: str = "3, 2, 1",
        runtime: int = SEQUENTIAL,
        without: tuple[str, ...] = (),
        more: str = "",
        returns: dict[str, int] | None = None,
    ) -> Path:
        stubs = [name for name in FUNCTIONS if name not in without and f" {name}(" not in more]
        code = "".join(f"int {name}(void) {{ return {(returns or {}).get(name, 0)}; }}\n" for name in stubs)
        code += "unsigned long dnnl_memory_desc_get_size(void) { return 0; }\n"
        code += "struct { int version[3]; const char* hash; unsigned cpu, gpu; } said = "
        code += f"{{{{{version}}}, 0, {runtime}, 0}};\nvoid* dnnl_version(void) {{ return &said; }}\n{more}"
        (tmp_path / "fake.c").write_text(code)
        library = tmp_path / "libdnnl.so.3"
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(tmp_path / "fake.c"), "-o", str(library)], check=True)
        return tmp_path

    return make


def facts(python: Callable[..., str], folder: Path) -> tuple[str, str, str]:
    """Path, version and reason with the library of a folder; all rows of oneDNN have the reason, others run."""
    path, version, reason, same, others = python(FACTS, LOWBIT_ONEDNN_PATH=str(folder)).splitlines()
    assert same == others == "True"
    return path, version, reason


def test_a_library_that_can_be_used(fake: Callable[..., Path], python: Callable[..., str]) -> None:
    folder = fake()
    assert facts(python, folder) == (str(folder / "libdnnl.so.3"), "3.2.1, no threads", "")


def test_a_library_that_is_found_by_the_variable_of_its_own(fake: Callable[..., Path], python: Callable[..., str]) -> None:
    folder = fake()
    (folder / "lib").mkdir()
    (folder / "libdnnl.so.3").rename(folder / "lib" / "libdnnl.so.3")
    said = python(FACTS, ONEDNN_ROOT=str(folder), LOWBIT_ONEDNN_PATH="").splitlines()
    assert said[0] == str(folder / "lib" / "libdnnl.so.3") and said[2] == ""


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"version": "4, 0, 0"}, "is oneDNN 4.0.0, no threads, wanted 3.x"),
        ({"version": "2, 7, 3"}, "is oneDNN 2.7.3, no threads, wanted 3.x"),
        ({"runtime": TBB}, "is oneDNN 3.2.1, TBB: its threads are not torch's, wanted a build with OpenMP"),
        ({"runtime": THREAD_POOL}, "a thread pool that the caller brings: its threads are not torch's"),
        ({"runtime": SYCL}, "3.2.1, SYCL: its threads are not torch's"),
        ({"runtime": 64}, "a runtime that lowbit does not know: its threads are not torch's"),
        ({"runtime": WITH_OPENMP}, "has no omp_set_num_threads"),
        ({"without": ("dnnl_primitive_execute",)}, "has no dnnl_primitive_execute: it is too old"),
        ({"returns": {"dnnl_engine_create": 1}}, "oneDNN: dnnl_engine_create failed: out of memory"),
        ({"returns": {"dnnl_engine_create": 5}}, "oneDNN: dnnl_engine_create failed: status 5"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_library_of_no_use(
    options: dict[str, object], reason: str, fake: Callable[..., Path], python: Callable[..., str]
) -> None:
    assert reason in facts(python, fake(**options))[2]


def test_a_file_that_is_no_library(tmp_path: Path, python: Callable[..., str]) -> None:
    """It is passed over; if there is no other, the reason tells why."""
    (tmp_path / "libdnnl.so.3").write_text("nothing of the kind")
    path, _, reason = facts(python, tmp_path)
    assert path != str(tmp_path / "libdnnl.so.3")
    assert not reason or f"{tmp_path}/libdnnl.so.3 cannot be loaded: " in reason


def test_a_library_that_is_nowhere(tmp_path: Path, python: Callable[..., str]) -> None:
    path, _, reason = facts(python, tmp_path)
    assert path or (f"libdnnl.so.3 was not found in {tmp_path}, " in reason and "onednn-cpu-gomp" in reason)


def test_a_second_openmp_is_refused(fake: Callable[..., Path], python: Callable[..., str]) -> None:
    more = "".join(f"int {name}(void) {{ return 0; }}\n" for name in OPENMP)
    folder = fake(runtime=WITH_OPENMP, more=more)
    code = "import torch, lowbit\nprint(lowbit.info()['oneDNN'])"
    said = python(code, LOWBIT_ONEDNN_PATH=str(folder))
    assert re.search(r"runs on the OpenMP of \S+libdnnl.so.3, and torch on that of \S+: their threads would fight", said)


OPENED = "#include <stdio.h>\n__attribute__((constructor)) static void opened(void) { fclose(fopen(\"{mark}\", \"w\")); }\n"
QUIET = """
import sys
from pathlib import Path
import torch, lowbit
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
x = torch.randn(5, 64)
lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight())
model(x)
with lowbit.force_kernel("linear_int8_int8_scalar"):
    model(x)
torch.ops.lowbit.linear(x, torch.zeros(4, 64 * 16 * 4, dtype=torch.uint8), 64, 64, 0, 0, False, 0)
print(Path(sys.argv[1]).exists())
lowbit.kernels("linear")
print(Path(sys.argv[1]).exists())
"""


def test_nothing_is_opened_before_a_row_is_asked_for(fake: Callable[..., Path], python: Callable[..., str], tmp_path: Path) -> None:
    mark = tmp_path / "opened"
    folder = fake(more=OPENED.replace("{mark}", str(mark)))
    assert python(QUIET, str(mark), LOWBIT_ONEDNN_PATH=str(folder)) == "False\nTrue\n"


FAILING = """
import torch, lowbit
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
lowbit.quantize_(model, lowbit.float_weight())
wanted = model(torch.ones(5, 64))
try:
    with lowbit.force_kernel("linear_float32_onednn"):
        model(torch.ones(5, 64))
except (NotImplementedError, RuntimeError) as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
assert torch.equal(model(torch.ones(5, 64)), wanted)
"""
PREFERRED = """
model[0].prefer("linear_float32_onednn")
assert torch.equal(model(torch.ones(5, 64)), wanted)
assert lowbit.explain(model, m=5)[0].row
"""
MATMUL = "dnnl_matmul_primitive_desc_create"
# A fake's answer for a format tag (two blocks of 16, first of k, then of n), and the name of an implementation.
PANELS = """int dnnl_memory_desc_query(void* desc, int what, void* to) {
  static const long sizes[] = {16, 16}, dims[] = {0, 1};
  if (what == 263) *(int*)to = 2; else *(const long**)to = what == 264 ? sizes : dims;
  return 0;
}
"""
NAMED = PANELS + 'int dnnl_primitive_desc_query(void* desc, int what, int index, const char** out) { return *out = "fake", 0; }\n'


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"more": PANELS, "returns": {MATMUL: 1}}, f"{MATMUL} failed: out of memory"),
        ({"more": PANELS, "returns": {MATMUL: 3}}, "oneDNN has no implementation of this product here"),
        ({"more": NAMED.replace("fake", "ref:any")}, "oneDNN has only its reference implementation of this product here, ref:any"),
        ({}, "format tag 503 of this version is not that of panels of 16 columns"),
    ],
    ids=["full memory", "none", "reference", "format tag"],
)
def test_a_primitive_that_cannot_be_made(options: dict[str, object], reason: str, fake: Callable[..., Path], python: Callable[..., str]) -> None:
    """The forced call fails with the reason; a preference and explain() go on to the rows of lowbit."""
    said = python(FAILING + PREFERRED, LOWBIT_ONEDNN_PATH=str(fake(**options)))
    assert said.startswith("NotImplementedError linear: no kernel row fits") and reason in said


@pytest.mark.parametrize("status, reason", [(1, "out of memory"), (5, "status 5")])
def test_a_primitive_that_fails(status: int, reason: str, fake: Callable[..., Path], python: Callable[..., str]) -> None:
    """An error of the call; the next one by another row runs."""
    said = python(FAILING, LOWBIT_ONEDNN_PATH=str(fake(more=NAMED, returns={"dnnl_primitive_execute": status})))
    assert said == f"RuntimeError oneDNN: dnnl_primitive_execute failed: {reason}\n"
