# SPDX-License-Identifier: Apache-2.0
"""write_whole: a file is replaced as a whole, others may read it, and nothing is left beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowbit.quant.whole_file import write_whole


def test_a_file_is_made_and_replaced_with_the_rights_of_any_file(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    for text in ("one", "two \u00e9"):
        write_whole(tmp_path / "file", text)
        assert (tmp_path / "file").read_text(encoding="utf-8") == text
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"file", "usual"}


def test_a_file_that_cannot_be_replaced_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")

    def full(source: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["file"]
