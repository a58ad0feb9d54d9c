# SPDX-License-Identifier: Apache-2.0
"""Files are replaced as a whole: every writer of a file that a user names leaves the old one where it cannot finish."""

from __future__ import annotations

import ast
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit.documents.whole_file import replaced_file, write_whole

PACKAGE = Path(lowbit.__file__).parent


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_made_and_replaced_with_the_rights_of_any_file(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    for text in ("one", "two \u00e9"):
        write_whole(tmp_path / "file", text)
        assert (tmp_path / "file").read_text(encoding="utf-8") == text
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert names(tmp_path) == {"file", "usual"}


def test_the_rights_of_the_old_file_and_a_link_to_it_stay(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_file_that_must_not_be_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write everything
    with pytest.raises(PermissionError, match="file must be writable"):
        write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_what_is_no_regular_file_is_written_as_it_is(tmp_path: Path) -> None:
    write_whole(os.devnull, "text")
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "text")
    reading, writing = os.pipe()
    write_whole(f"/dev/fd/{writing}", "text")
    assert os.read(reading, 9) == b"text"
    os.close(reading), os.close(writing)


def test_files_beside_it_take_their_places_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (order.append(Path(target).name), replace(source, target)))
    with replaced_file(tmp_path / "a") as place:
        place.write_text("model"), place.with_name("a.data").write_text("weights")
    assert order == ["a.data", "a"] and (tmp_path / "a.data").read_text() == "weights"


# ---- every writer --------------------------------------------------------------------------------------------------


def plan() -> Callable[[Path], object]:
    return lowbit.autoquant(torch.nn.Linear(32, 32), torch.randn(2, 32), cache=False).save


def calibration() -> Callable[[Path], object]:
    return lowbit.calibrate(torch.nn.Linear(32, 32), [torch.randn(2, 32)]).save


def report(kind: str, folder: Path) -> Callable[[Path], object]:
    (folder / "torch.json").write_text('{"version": "2.10", "rank": 0, "pg_config": {}, "entries": []}')
    return lambda path: lowbit.recorder.report(folder, **{kind: str(path)})


def gguf(folder: Path) -> Callable[[Path], object]:
    pytest.importorskip("gguf"), pytest.importorskip("transformers")
    from gguf_files import write

    from lowbit.checkpoints.gguf import save
    from lowbit.huggingface.load_gguf import load_model

    source = write(folder / "source.gguf", "llama")
    model = load_model(source, fuse=False)
    return lambda path: save(model, path, like=path if path.exists() else source)


def onnx(external_data: bool) -> Callable[[Path], object]:
    pytest.importorskip("onnx"), pytest.importorskip("onnxscript")
    from lowbit.export.onnx import export

    model = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    return lambda path: export(model, (torch.randn(2, 32),), path, external_data=external_data)


WRITERS: dict[str, Callable[[Path], Callable[[Path], object]]] = {
    "plan": lambda folder: plan(),
    "calibration": lambda folder: calibration(),
    "dump": lambda folder: lowbit.recorder.dump,
    "report": lambda folder: report("json_file", folder),
    "trace": lambda folder: report("trace_file", folder),
    "gguf": gguf,
    "onnx": lambda folder: onnx(False),
    "onnx with data beside it": lambda folder: onnx(True),
}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("recorder_on")
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_or_an_interrupt_leaves_the_old_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir(), (tmp_path / "out").mkdir()
    write, path = WRITERS[name](tmp_path / "source"), tmp_path / "out" / "file"
    write(path)
    old = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert "file" in old and len(old) == (2 if "beside" in name else 1)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # what a full disk looks like to the process
    try:
        with pytest.raises((OSError, RuntimeError)):
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == old

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupt)
        write(path)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == old
    write(path)
    assert names(path.parent) == set(old)


ELSEWHERE = {
    "quant/safetensors_file.py": 1,  # write_safetensors, whose caller gives it the place
    "checkpoints/gguf/saving.py": 1,  # the same
    "checkpoints/sharded_files.py": 1,  # the index of the files, in a folder that its caller replaces
}
"""Calls that write a file outside of the block of a `replaced_file`, by the file that holds them."""
_WRITING = re.compile(
    r"""\.write_(text|bytes)$|\b(torch\.save|GGUFWriter|save_file|savefig)$|json\.dump$"""
)


def test_no_other_call_of_lowbit_writes_a_file() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        count = sum(1 for call in outside_of_blocks(ast.parse(path.read_text())) if is_writing(call))
        if count and path.name != "whole_file.py":
            found[str(path.relative_to(PACKAGE))] = count
    assert found == ELSEWHERE


def outside_of_blocks(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.With) and any("replaced_file(" in ast.unparse(item) for item in node.items):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from outside_of_blocks(child)


def is_writing(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    opens = name.split(".")[-1] == "open" and any(
        isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) & set("wax+") and len(mode.value) < 4
        for mode in [*call.args, *(word.value for word in call.keywords)]
    )
    return opens or bool(_WRITING.search(name))
