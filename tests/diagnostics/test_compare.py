# SPDX-License-Identifier: Apache-2.0
"""`lowbit compare`: the error of each weight against another checkpoint, in dB, as a table and as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from wrong_types import variants

import lowbit
from lowbit.__main__ import main
from lowbit.quant import repack

safetensors = pytest.importorskip("safetensors.torch")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 80), nn.LayerNorm(80), nn.Linear(80, 33, bias=False))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, lowbit.QuantizationReport]:
    float_file, packed = tmp_path / "float.safetensors", tmp_path / "int4.safetensors"
    first = model()
    safetensors.save_file(first.state_dict(), float_file)
    report = lowbit.quantize_(first, lowbit.int4_weight_only(32))
    safetensors.save_file(first.state_dict(), packed)
    return float_file, packed, report


def test_the_error_is_that_of_the_report(files):
    float_file, packed, report = files
    comparison = lowbit.compare_checkpoints(float_file, packed)
    assert [(row.layer, row.a, row.b) for row in comparison.rows] == [("0", "float32", "int4 g32"), ("2", "float32", "int4 g32")]
    for row, wanted in zip(comparison.rows, report.rows, strict=True):
        assert row.error_db == pytest.approx(wanted.error_db, abs=0.01) and row.shape == wanted.shape
    assert min(row.error_db for row in comparison.rows) < comparison.error_db < max(row.error_db for row in comparison.rows)
    assert "int4 g32" in repr(comparison) and "<table>" in comparison._repr_html_()


def test_another_layout_and_the_same_weights_are_no_error(files, tmp_path):
    _, packed, _ = files
    rows = tmp_path / "rows.safetensors"
    safetensors.save_file(repack(safetensors.load_file(packed)), rows)
    comparison = lowbit.compare_checkpoints(packed, rows)
    assert comparison.error_db == math.inf and "2 of 2 are the same" in repr(comparison)


def test_what_only_one_holds_is_named(files, tmp_path):
    float_file, packed, _ = files
    state = safetensors.load_file(packed)
    state["other.weight"] = torch.ones(3, 3)
    safetensors.save_file(state, packed)
    comparison = lowbit.compare_checkpoints(float_file, packed)
    assert comparison.only_b == ["other"] and f"only in {packed}: other" in repr(comparison)


def test_the_command_prints_the_table_and_draws_the_picture(files, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    float_file, packed, _ = files
    picture = tmp_path / "error.png"
    assert main(["compare", str(float_file), str(packed), "--picture", str(picture)]) == 0
    assert "error dB" in capsys.readouterr().out and picture.read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_compared_is_refused(files, tmp_path, capsys, subtests):
    float_file, packed, _ = files
    other = tmp_path / "other.safetensors"
    for state, match in (
        ({"a.weight": torch.ones(2, 2)}, "must have weights of the same names, got none"),
        ({"0.weight": torch.ones(3, 3)}, "must have the shape [80, 96]"),
        ({"0.weight": torch.ones(80, 96, dtype=torch.uint8)}, "torch.uint8 without one"),
        ({"0.weight": torch.ones(8, 8, dtype=torch.uint8), "0.layout": torch.full((8,), 77)}, "layout version 77"),
    ):
        with subtests.test(match):
            safetensors.save_file(state, other)
            assert main(["compare", str(float_file), str(other)]) == 1
            assert match in capsys.readouterr().err
    assert main(["compare", str(float_file), str(tmp_path)]) == 1
    assert "there is no" in capsys.readouterr().err


def test_a_header_of_wrong_types_is_refused(tmp_path, subtests):
    file = tmp_path / "a.safetensors"
    safetensors.save_file({"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4, 1)}, file, {"from": "here"})
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for what, header in variants(json.loads(content[8:begin])):
        with subtests.test(what):
            text = json.dumps(header).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + content[begin:])
            try:
                assert lowbit.compare_checkpoints(file, file).error_db == math.inf, what
            except ValueError as error:
                assert "a.safetensors" in str(error)
                refused += 1
    assert refused > 100
    file.write_bytes((1 << 20).to_bytes(8, "little") + b"[" * (1 << 20))
    with pytest.raises(ValueError, match="a.safetensors must be a safetensors file: "):
        lowbit.compare_checkpoints(file, file)


@pytest.mark.parametrize("call", [lambda folder: lowbit.compare_checkpoints(folder, folder), lambda folder: lowbit.load(model(), folder)])
def test_an_index_of_wrong_types_is_refused(call, tmp_path, subtests):
    index = tmp_path / "model.safetensors.index.json"
    for _, value in variants({"weight_map": {"a.weight": "a.safetensors"}}):
        with subtests.test(value=value):
            index.write_text(json.dumps(value))
            with pytest.raises((ValueError, FileNotFoundError)):
                call(tmp_path)
    index.write_text('{"weight_map": {"a.weight": 7}}')
    with pytest.raises(ValueError, match=r"index.json must have a weight_map from names of tensors to files, got files .7."):
        call(tmp_path)
