# SPDX-License-Identifier: Apache-2.0
"""tools/index_page.py makes a page that needs no file beside it; `.ci/wheels` itself builds for minutes and is run by hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
URL = "https://example.org/lowbit"


def make(tree: Path, url: str) -> subprocess.CompletedProcess[str]:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "index_page.py", tree, url], capture_output=True, text=True, check=False
    )


def test_every_link_is_absolute_and_leads_to_a_file(tmp_path: Path) -> None:
    relative = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert make(tmp_path, URL).returncode == 0
    page = (tmp_path / "README.md").read_text()
    assert relative and not re.findall(r"\]\((?!https?:)", page)
    made = re.findall(rf"(!?)\[[^\]]*\]\({URL}/(raw|blob)/v[\d.]+/([^)#]+)", page)
    assert sorted(path for _, _, path in made) == sorted(relative)
    assert all((ROOT / path).exists() and (kind == "raw") == bool(picture) for picture, kind, path in made)


def test_the_metadata_name_the_address_once(tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    assert make(tmp_path, URL).returncode == 0
    made = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    here = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert made.pop("urls")["Homepage"] == URL
    assert made == here


@pytest.mark.parametrize("url", ["example.org", "https://example.org/lowbit/", ""])
def test_another_address_changes_nothing(tmp_path: Path, url: str) -> None:
    made = make(tmp_path, url)
    assert made.returncode != 0 and "URL must be https://" in made.stderr
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()
