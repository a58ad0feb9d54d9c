# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md as a test: which room may include or import which. Read from the files, not from what gets loaded."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC, PACKAGE = ROOT / "csrc", ROOT / "python" / "lowbit"

CPP_ARROWS = {
    "core": {"core"},
    "formats": {"formats", "core"},
    "rules": {"rules", "core"},
    "score": {"score", "core"},
    "sim": {"sim", "ops", "core"},
    "recorder": {"recorder", "core"},
    "external": {"external", "lowbit", "ops", "formats", "rules", "core"},
    "ops": {"ops", "recorder", "score", "formats", "rules", "core"},
    "gpu": {"gpu", "ops", "formats", "rules", "core"},
    "cuda": {"cuda", "gpu", "ops", "score", "formats", "rules", "core"},
    "level_zero": {"level_zero", "gpu", "ops", "score", "formats", "rules", "core"},
    "onednn": {"onednn", "ops", "formats", "core"},
    "cpu": {"cpu", "ops", "score", "formats", "rules", "core"},
    "torch": {"torch", "ops", "score", "formats", "rules", "core"},
    "capi": {"capi", "lowbit", "torch", "ops", "formats", "core"},
    "bindings": {
        "bindings",
        "torch",
        "external",
        "sim",
        "cuda",
        "level_zero",
        "onednn",
        "ops",
        "recorder",
        "score",
        "formats",
        "rules",
        "core",
    },
    "wheel": set(),
    "backends.cpp": {"cpu", "cuda", "external", "level_zero", "onednn", "sim", "ops", "core"},
}
PYTHON_ARROWS = {
    "documents": {"documents"},
    "tables": {"tables"},
    "reference": {"reference"},
    "ops": {"ops", "_C"},
    "formats": {"formats", "ops", "_C"},
    "quant": {"quant", "devices", "documents", "formats", "ops", "tables", "_C"},
    "training": {"training", "quant", "devices", "formats", "ops", "_C"},
    "optim": {"optim", "devices", "ops", "_C"},
    "score": {"score", "devices", "_C"},
    "attention": {"attention", "score", "devices", "ops", "_C"},
    "autotune": {"autotune", "quant", "formats", "attention", "devices", "documents", "tables", "_C"},
    "checkpoints": {"checkpoints", "quant", "documents", "formats", "tables", "_C"},
    "models": {"models", "checkpoints", "attention", "score", "quant", "formats", "ops", "tables", "_C"},
    "huggingface": {
        "huggingface",
        "models",
        "checkpoints",
        "optim",
        "quant",
        "documents",
        "formats",
        "devices",
        "ops",
        "tables",
        "_C",
    },
    "peers": {"peers", "huggingface", "checkpoints", "optim", "quant", "formats", "ops", "tables", "_C"},
    "export": {"export", "quant", "documents", "formats", "ops", "_C"},
    "compile": {"compile", "autotune", "models", "quant", "formats", "ops", "tables", "_C"},
    "devices": {"devices", "ops", "_C"},
    "backends": {"backends", "devices", "_C"},
    "diagnostics": {
        "diagnostics",
        "backends",
        "compile",
        "peers",
        "checkpoints",
        "devices",
        "attention",
        "quant",
        "formats",
        "ops",
        "tables",
        "_C",
    },
    "recorder": {"recorder", "documents", "tables", "_C"},
    "testing": {"testing", "backends", "ops", "reference", "_C"},
    "__main__.py": {"", "documents", "huggingface", "recorder"},
    "__init__.py": {
        "ops",
        "backends",
        "compile",
        "devices",
        "formats",
        "quant",
        "optim",
        "attention",
        "autotune",
        "models",
        "huggingface",
        "peers",
        "diagnostics",
        "recorder",
        "training",
        "_C",
    },
}
FORBIDDEN_WORDS = {"utils", "util", "common", "misc", "helpers", "helper", "manager", "new", "v2", "legacy"}


def cpp_files() -> list[Path]:
    return sorted(path for pattern in ("*.cpp", "*.hpp", "*.cuh", "*.h", "*.inc") for path in CSRC.rglob(pattern))


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_the_files_are_found() -> None:
    assert len(cpp_files()) > 10 and len(python_files()) > 10


def test_cpp_files_include_only_the_rooms_they_may() -> None:
    for path in cpp_files():
        check_includes(path)


def test_decode_builds_on_attention_and_attention_knows_nothing_of_decode() -> None:
    for path in cpp_files():
        if path.parent.name == "attention":
            assert not re.search(r'#include "\w+/decode/', path.read_text()), path


def check_includes(path: Path) -> None:
    room, file = path.relative_to(CSRC).parts[0], path.relative_to(CSRC)
    assert room in CPP_ARROWS, f"new room {room}: add its arrows here and in docs/architecture.md"
    for line in path.read_text().splitlines():
        ours, system = re.match(r'\s*#\s*include\s+"([^"]+)"', line), re.match(r"\s*#\s*include\s+<([^>]+)>", line)
        if ours:
            target = ours[1].split("/")[0]
            assert "/" in ours[1], f"{file} includes {ours[1]}: include by room, as core/dtype.hpp"
            assert target in CPP_ARROWS[room], f"{file} may not include {ours[1]}"
            if target == "ops":
                assert ours[1].endswith(".hpp"), f"{file} includes headers of ops only, not {ours[1]}"
        if system:
            name = system[1]
            assert not name.startswith(("torch/", "ATen/", "c10/")), f"{file}: torch headers are never needed: {name}"
            assert not name.startswith(("pybind11", "Python.h")) or room == "bindings", (
                f"{file}: {name} belongs to bindings"
            )
            assert "omp.h" not in name, f"{file}: threads are torch's"
            if name.endswith(("intrin.h", "arm_neon.h")):
                assert room == "cpu" and path.parent.name == "simd", f"{file}: intrinsics belong to cpu/simd: {name}"


def test_a_device_is_its_folder_and_its_line_in_each_list() -> None:
    """The table of docs/architecture.md. No room decides by the type of a device: ops, torch and kernels have no line about one."""

    def lines(own: str, folder: str, binding: str) -> dict[str, int]:
        return {
            str(path.relative_to(CSRC)): count
            for path in [*cpp_files(), CSRC / "CMakeLists.txt"]
            if path.relative_to(CSRC).parts[0] != folder and path.name != binding
            if (count := sum(bool(re.search(own, line)) for line in path.read_text().splitlines()))
        }

    lists = {"core/place.hpp": 1, "backends.cpp": 2, "CMakeLists.txt": 1}
    bindings = {"bindings/register.hpp": 1, "bindings/module.cpp": 1}  # memory and faults, libraries, for Python
    assert lines(r"\bsim(::|/)|simulated", "sim", "simulated.cpp") == lists | bindings
    emulated = {"backends.cpp": 3, "CMakeLists.txt": 4}  # and the text of the device sources, the pack of their code
    assert (
        lines(r"\bcuda(::|/)|X\(cuda|register_cuda|LOWBIT_CUDA|\(cuda\)", "cuda", "cuda.cpp")
        == lists | bindings | emulated
    )
    assert (
        lines(r"\blevel_zero(::|/)|X\(level_zero|register_level_zero|\(level_zero\)", "level_zero", "level_zero.cpp")
        == lists | bindings
    )
    for path in python_files():
        if "simulated" not in path.parts:
            assert "lowbit_sim" not in code_of(path), path
    for room in ("ops", "score", "formats", "rules"):
        for path in (CSRC / room).rglob("*.?pp"):
            assert "DeviceType::" not in path.read_text(), path


def code_of(path: Path) -> str:
    """The file without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""
    return ast.unparse(tree)


def test_intrinsics_stay_in_simd() -> None:
    isas = {header.stem for header in (CSRC / "cpu" / "simd").glob("*.hpp")}
    for path in cpp_files():
        if path.parent.name != "simd" and path.stem not in isas:
            assert not re.search(r"\b_mm(256|512)?_\w+\(", path.read_text()), (
                f"{path.relative_to(CSRC)} uses intrinsics"
            )


def test_python_files_import_only_the_rooms_they_may() -> None:
    for path in python_files():
        file = path.relative_to(PACKAGE)
        room = file.parts[0]
        assert room in PYTHON_ARROWS, f"new room {room}: add its arrows here and in docs/architecture.md"
        for module in imports(path):
            package, _, rest = module.partition(".")
            if package == "lowbit":
                assert rest.partition(".")[0] in PYTHON_ARROWS[room], f"{file} may not import {module}"
            if room == "reference":
                own = {"lowbit", "torch", "__future__", "collections", "dataclasses", "itertools", "math", "typing"}
                assert package in own, f"{file} may not import {module}"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            if node.module == "lowbit":
                yield from (f"lowbit.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


def test_no_python_file_imports_what_imports_it() -> None:
    """Also not by an import inside a function, or for type hints alone."""
    files = {
        ".".join(("lowbit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in python_files()
    }
    reaches = {
        module: {name for name in imported_files(path, files) if name in files}
        for module, path in files.items()
        if module != "lowbit"
    }
    done: set[str] = set()

    def walk(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for name in sorted(reaches[module] - {"lowbit"}):
                walk(name, (*above, module))
            done.add(module)

    for module in sorted(reaches):
        walk(module, ())


def imported_files(path: Path, files: Container[str]) -> Iterator[str]:
    """Modules that a file imports; `from package import file` is the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in files else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_autoload_package_imports_nothing_at_the_top() -> None:
    tree = ast.parse((ROOT / "python" / "lowbit_autoload" / "__init__.py").read_text())
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in top] == ["from __future__ import annotations", "import os"]


def test_rooms_of_the_tests_mirror_the_package() -> None:
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("test_*.py"))}
    assert rooms - {
        "torch",
        "structure",
        "cpp",
        "capi",
        "cuda",
        "level_zero",
        "onednn",
        "examples",
        "docs",
        "benchmarks",
        "fuzz",
    } <= {path.name for path in PACKAGE.iterdir()}


def test_every_instruction_set_is_asked_for_the_whole_vector() -> None:
    isas = re.findall(r"^ *lowbit_cpu_isa\((\w+) ", (CSRC / "cpu" / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert {"scalar", "avx2", "avx2_vnni", "avx512", "avx512_vnni"} <= set(isas)
    for isa in isas:
        header = CSRC / "cpu" / "simd" / f"{isa}.hpp"
        assert header.read_text().endswith('\n#include "cpu/simd/vector.hpp"\n'), (
            f"{header.name} must end with vector.hpp"
        )


def test_files_are_named_after_what_they_hold() -> None:
    for path in [*cpp_files(), *python_files()]:
        assert not FORBIDDEN_WORDS & set(path.stem.split("_")), path
