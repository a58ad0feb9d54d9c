# SPDX-License-Identifier: Apache-2.0
"""examples/cpp: a small model is compiled, the program is built as its CMakeLists.txt says, and its tokens are compared."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lowbit

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"
PROMPT, COUNT, CONTEXT = (5, 700, 33), 12, 32

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ on this machine"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake: pip install cmake"),
]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("cpp") / "small.pt2"
    done = run(sys.executable, EXAMPLE / "export.py", path, *f"--layers 1 --hidden 192 --context {CONTEXT}".split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"build/cpp/generate {path} 64 ")
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("build")
    folders = f"-DTorch_DIR={torch.utils.cmake_prefix_path}/Torch", f"-Dlowbit_DIR={Path(lowbit.__path__[0]) / 'cmake'}"
    for command in (
        ["cmake", "-S", EXAMPLE, "-B", build, *folders],
        ["cmake", "--build", build],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "generate"


def exporting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exporting", EXAMPLE / "export.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_the_tokens_are_those_of_the_package_in_python(package: Path, program: Path) -> None:
    model = exporting().random_model(1, 192)
    compiled = torch._inductor.aoti_load_package(str(package))
    tokens, new = list(PROMPT), list(PROMPT)
    for _ in range(COUNT):
        places = torch.arange(len(tokens) - len(new), len(tokens))
        logits = compiled(input_ids=torch.tensor([new]), cache_position=places)[0, -1]
        wanted = model(torch.tensor([tokens])).logits[0, -1]
        assert (logits - wanted).norm() < 0.02 * wanted.norm()  # a rounding of activations may go the other way
        new = [int(logits.argmax())]
        tokens += new
    done = run(program, package, COUNT, *PROMPT)
    assert done.returncode == 0, done.stderr
    assert [int(token) for token in done.stdout.splitlines()[0].split()] == tokens[len(PROMPT) :]
    assert len(set(tokens)) > 5
    assert re.search(r"^prompt: \d+ tokens/s\nanswer: \d+ tokens/s$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([30, 5, 6, 7], "generate: the model was compiled for 1 to 32 tokens, got 33"),
        ([2, 5, 1024], "generate: index out of bounds: 0 <= .* < 1024"),
        ([2], "usage: generate MODEL.pt2 COUNT TOKEN"),
    ],
    ids=["too many tokens", "no word", "no prompt"],
)
def test_what_cannot_be_said_is_an_error(package: Path, program: Path, arguments: list[int], text: str) -> None:
    done = run(program, package, *arguments)
    assert done.returncode in (1, 2) and re.search(text, done.stderr), done.stderr


def test_a_missing_package_is_an_error_without_a_backtrace(program: Path, tmp_path: Path) -> None:
    done = run(program, tmp_path / "none.pt2", 1, 1)
    assert done.returncode == 1 and done.stderr.startswith("generate: ") and "frame #" not in done.stderr, done.stderr
