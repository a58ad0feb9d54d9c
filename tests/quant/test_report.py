# SPDX-License-Identifier: Apache-2.0
"""QuantizationReport: an aligned table, escaped HTML, plain data."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant import QuantizationReport, ReportRow, quantize_


def report() -> QuantizationReport:
    rows = [
        ReportRow("fc1", "int8 per-channel", (4096, 4096), 67108864, 16809984, 44.13, "linear_int8_avx2"),
        ReportRow("<script>", "", (10, 10), 400, 400, note="a & b"),
        ReportRow("meta", "int8 per-channel", (8, 8), 256, 1152, math.nan),
        ReportRow("exact", "float32", (8, 8), 256, 4096, math.inf),
    ]
    return QuantizationReport("int8_weight_only()", rows, ["a note"], 10**9, 3 * 10**8)


def test_text_is_aligned_and_says_totals_skips_and_notes():
    text = repr(report())
    lines = text.splitlines()
    assert lines[0] == "int8_weight_only(): 3 quantized, 1 skipped"
    assert "skipped" in lines[3] and "a & b" in lines[3]
    column = lines[1].index("shape")
    assert all(line[column].isdigit() and line[column - 1] == " " for line in lines[2:6])
    assert "44.1" in lines[2] and "linear_int8_avx2" in lines[2] and "exact" in lines[5] and "nan" not in text
    assert "quantized weights: 67.11 MB -> 16.82 MB (-75 %)" in text
    assert "whole model: 1.00 GB -> 300.00 MB (-70 %)" in text
    assert lines[-1] == "note: a note"


def test_html_is_a_table_with_escaped_text():
    html = report()._repr_html_()
    assert html.count("<tr>") == 5 and "&lt;script&gt;" in html and "<script>" not in html and "a &amp; b" in html


def test_to_dict_is_plain_data_with_totals():
    data = report().to_dict()
    assert json.loads(json.dumps(data))["rows"][0]["shape"] == [4096, 4096]
    assert (data["quantized"], data["skipped"], data["model_bytes_after"]) == (3, 1, 3 * 10**8)
    assert data["bytes_before"] == 67108864 + 512


def test_layers_are_a_sequence_by_number_and_by_name():
    layers = report().layers
    assert len(layers) == 4 and [row.layer for row in layers] == ["fc1", "<script>", "meta", "exact"]
    assert layers[0].error_db == 44.13 and layers[-1].format == "float32" and layers["meta"] is layers[2]
    assert [row.layer for row in layers[1:3]] == ["<script>", "meta"] and layers[0] in layers
    assert "44.1" in repr(layers) and "44.1" not in repr(layers[1:]) and "fc1" in layers._repr_html_()
    with pytest.raises(KeyError, match="layers: the name must be one of fc1, <script>, meta, exact, got"):
        layers["fc2"]
    with pytest.raises(IndexError):
        layers[4]


def test_layers_of_one_kind_have_a_line_each(config):
    model = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
    result = quantize_(model, config)
    assert "x 4" in repr(result) and len(repr(result.layers).splitlines()) == 1 + 4


def test_layers_become_a_table_of_numbers_of_pandas():
    pandas = pytest.importorskip("pandas")
    frame = report().layers.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame["layer"]) == ["fc1", "<script>", "meta", "exact"]
    assert frame["bytes_after"].sum() == 16809984 + 400 + 1152 + 4096 and frame["shape"][0] == (4096, 4096)
    assert frame["error_db"].dtype == "float64" and len(QuantizationReport("").layers.to_pandas()) == 0


def test_to_pandas_without_pandas_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas: pip install pandas"):
        report().layers.to_pandas()


def test_the_plot_has_bytes_before_and_after_and_the_errors_that_are_finite():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    sizes, errors = report().plot()
    assert [bar.get_height() for bar in sizes.containers[0]] == [67.108864, 0.0004, 0.000256, 0.000256]
    assert [text.get_text() for text in sizes.get_legend().get_texts()] == ["before", "int8 per-channel", "stays float", "float32"]
    points = [tuple(point) for scatter in errors.collections for point in scatter.get_offsets().tolist()]
    assert points == [(0.0, 44.13)]
    assert [label.get_text() for label in errors.get_xticklabels()] == ["fc1", "<script>", "meta", "exact"]
    QuantizationReport("int8_weight_only()").plot()


def test_the_plot_without_matplotlib_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="QuantizationReport.plot needs matplotlib"):
        report().plot()


def test_an_empty_report_prints():
    text = repr(QuantizationReport("int8_weight_only()"))
    assert "no layer was quantized" in text
    assert QuantizationReport("int8_weight_only()")._repr_html_()


def test_every_quantized_row_names_a_kernel_that_runs(config, model, x):
    rows = quantize_(model, config).quantized
    known = {row["name"] for row in lowbit._C.kernels("linear")}
    assert all(row.kernel.split(" ")[0] in known for row in rows)


def test_model_totals_count_everything_once(config):
    model = nn.ModuleDict({"embed": nn.Embedding(64, 64), "fc": nn.Linear(64, 64)})
    model.register_buffer("mask", torch.zeros(100))
    result = quantize_(model, config)
    assert result.model_bytes_before == (64 * 64 * 2 + 64 + 100) * 4
    assert result.model_bytes_after == sum(t.nbytes for t in model.state_dict().values())
