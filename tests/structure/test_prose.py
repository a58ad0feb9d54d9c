# SPDX-License-Identifier: Apache-2.0
"""Prose is wrapped as people wrap it: lines of 120 columns, none broken in mid-sentence, no word alone on the last one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from in_folder import module_in

ROOT = Path(__file__).parents[2]
ROOMS = ("csrc", "python", "benchmarks", "examples", "tools")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module_in("tools", "wrap_prose")


def test_docstrings_and_comments_are_whole(tool: ModuleType) -> None:
    """`python tools/wrap_prose.py FILE` mends a file."""
    broken = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in tool.SUFFIXES):
        if tool.wrapped(path) != path.read_text():
            broken.append(str(path.relative_to(ROOT)))
    assert not broken, f"python tools/wrap_prose.py {' '.join(broken)}"


def test_pages_are_wrapped(tool: ModuleType) -> None:
    """The API page is made of docstrings; the changelog is a list of long lines."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if page.name not in ("api.md", "changelog.md")]
    ragged = [str(page.relative_to(ROOT)) for page in pages if tool.wrapped(page) != page.read_text()]
    assert not ragged, f"python tools/wrap_prose.py {' '.join(ragged)}"


def test_a_broken_docstring_is_found_and_mended(tool: ModuleType) -> None:
    full = "Make one from a float layer with ``quantize_`` or ``from_linear``, from plain codes with ``pack``. The constructor"
    broken = f'"""Name.\n\n{full}\nmakes\nan unset layer, to load a state dict into.\n\n    code  stays\n    as it is\n"""\n'
    mended = tool.wrap_python(broken)
    assert f"{full} makes\nan unset layer, to load a state dict into.\n" in mended
    assert mended.endswith("\n\n    code  stays\n    as it is\n\"\"\"\n")
    assert tool.wrap_python(mended) == mended


def test_an_argument_of_a_docstring_keeps_its_indent(tool: ModuleType) -> None:
    long = "the number of elements that share one scale, a power of two from 32 to 4096, and of the classes with 4 bits 128 as"
    lines = ["Args:", f"    block_size: {long}", "        in", "        torchao.", "    dtype: of the bias."]
    mended = tool.wrap_lines(lines, everywhere=False, stays=lambda line: False)
    assert mended[0] == "Args:" and mended[-1] == "    dtype: of the bias." and all(len(line) <= 120 for line in mended)
    assert mended[1].startswith("    block_size: ") and all(line.startswith("        ") for line in mended[2:-1])
    assert " ".join(mended).split() == " ".join(lines).split()


def test_no_word_stands_alone_and_code_stays_in_one_piece(tool: ModuleType) -> None:
    lines = tool.wrap("word " * 24 + "`a name of several words` last", "- ", "  ")
    assert len(lines) == 2 and len(lines[-1].split()) >= tool.FEWEST_WORDS and all(len(line) <= 120 for line in lines)
    assert sum("`a name of several words`" in line for line in lines) == 1


def test_tables_code_and_headings_of_a_page_stay(tool: ModuleType) -> None:
    stays = f"# {'title ' * 30}\n\n| {'cell ' * 40}|\n|---|\n\n```\n{'x = 1; ' * 30}\n```\n\n<!-- {'note ' * 40}-->\n"
    assert tool.wrap_page(stays) == stays
    assert tool.wrap_page(f"{stays}\n- {'item ' * 30}\n") == f"{stays}\n- {'item ' * 22}item\n  {'item ' * 6}item\n"
