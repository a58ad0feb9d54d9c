# SPDX-License-Identifier: Apache-2.0
"""What the docs say about the code is so: links lead somewhere, rows are named, the recipes' diffs apply, the README's commands are those of .ci/run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowbit

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_readme_has_the_two_commands_of_ci() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in (
        'pip install -c constraints.txt ".[examples]" && python examples/01_quantize_a_model.py',
        'pip install -c constraints.txt ".[test]" && pytest',
    ):
        assert command in readme.splitlines() and command in ci
    assert len(readme.splitlines()) <= 120


@pytest.mark.parametrize("page, op", [("linear", "linear"), ("optim", "optim_step")])
def test_every_row_is_in_the_page_of_its_op(page: str, op: str) -> None:
    text = (ROOT / "docs" / "ops" / f"{page}.md").read_text()
    for row in lowbit.kernels(op):
        name = str(row["name"]).removesuffix(f"_{row['backend']}")
        assert f"`{name}_<isa>`" in text and f"`{row['backend']}`" in text, row["name"]


def hunks(page: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each hunk of the page's diffs: (file, lines before, lines after)."""
    for block in re.findall(r"^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for part in re.split(r"(?=^diff --git )", block, flags=re.MULTILINE)[1:]:
            file = re.match(r"diff --git a/(\S+)", part)
            for hunk in re.split(r"^@@ .*\n", part, flags=re.MULTILINE)[1:]:
                lines = hunk.splitlines()
                yield str(file and file[1]), [x[1:] for x in lines if x[:1] in " -"], [x[1:] for x in lines if x[:1] in " +"]


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.name)
def test_recipe_applies_to_the_code_as_it_is(page: Path) -> None:
    found = list(hunks(page))
    assert len(found) > 5
    reached: dict[str, int] = {}
    for file, before, after in found:
        if not before:
            assert not (ROOT / file).exists() and after, f"{file} is there already"
            continue
        old = "\n" + "\n".join(before) + "\n"
        at = ("\n" + (ROOT / file).read_text()).find(old, reached.get(file, 0))
        assert at >= 0, f"{page.name} does not apply to {file}:{old}"
        reached[file] = at + len(old) - 1
