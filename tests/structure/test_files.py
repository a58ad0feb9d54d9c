# SPDX-License-Identifier: Apache-2.0
"""Every source file: licence on its first line, at most 500 lines; stubs and row names agree with the extension."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from lowbit import _C, testing

ROOT = Path(__file__).parents[2]
LIMIT = 500
ROOMS = ("csrc", "python", "tests", "benchmarks", "examples")
SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".h"}


def source_files() -> list[Path]:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in SUFFIXES]
    files += [*(ROOT / "csrc").rglob("CMakeLists.txt"), ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    return sorted(path for path in files if path.is_file())


def test_source_files_name_their_licence_and_are_short() -> None:
    for path in source_files():
        lines, name = path.read_text().splitlines(), path.relative_to(ROOT)
        assert any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]), name
        assert len(lines) <= LIMIT, f"{name}: {len(lines)} lines: split it by what it holds"


def test_files_of_tests_have_names_of_their_own() -> None:
    """Their folders are no packages: of two files of one name a run of all tests imports one."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_stub_and_extension_have_the_same_names() -> None:
    tree = ast.parse((ROOT / "python" / "lowbit" / "_C.pyi").read_text())
    stub = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")}
    stub |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    public = {name for name in dir(_C) if not name.startswith("_")}
    assert stub == public


def test_stub_and_extension_have_the_same_arguments() -> None:
    tree = ast.parse((ROOT / "python" / "lowbit" / "_C.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            signature = (getattr(_C, node.name).__doc__ or "").splitlines()[0]
            inside = signature[signature.index("(") + 1 : signature.rindex(")")]
            names = re.findall(r"(?:^|, )(\w+):", inside)
            assert names == [argument.arg for argument in node.args.args], signature


@pytest.mark.parametrize("op", ["linear", "quantize", "attention_forward", "attention_backward", "score_program", "decode"])
def test_row_names_follow_op_what_target(op: str) -> None:
    rows = testing.rows(op)
    for row in rows:
        assert re.fullmatch(rf"{op}_[a-z0-9]+(_[a-z0-9]+)*_{row['backend']}", str(row["name"])), row
    assert len({row["name"] for row in rows}) == len(rows)
    isas = {row["backend"] for row in rows} - {"onednn"}
    assert isas <= set(_C.isa()["compiled"]) and "scalar" in isas
    if op == "linear":
        assert isas == set(_C.isa()["compiled"]), "every instruction set serves linear"
