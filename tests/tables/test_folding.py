# SPDX-License-Identifier: Apache-2.0
"""Layers of one kind are one line, wherever layers are listed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import lowbit
from lowbit.autotune.plan import Plan
from lowbit.autotune.plan_row import PlanRow
from lowbit.tables.folding import LayerNames, decibels, folded, told
from lowbit.tables.table import Table


@dataclass
class Row:
    layer: str
    what: str


def test_layers_that_are_alike_share_a_line_and_others_of_the_kind_are_counted():
    rows = [Row(f"layers.{i}.{name}", name if i != 2 else "other") for i in range(5) for name in ("up", "down")]
    lines = folded([Row("", "head"), *rows], lambda row: row.what)
    assert [name for name, _ in lines] == ["(the model)", "layers.*.up x 4 of 5", "layers.2.up", "layers.*.down x 4 of 5", "layers.2.down"]
    assert [row.layer for row in lines[1][1]] == [f"layers.{i}.up" for i in (0, 1, 3, 4)]


def test_two_layers_keep_their_names():
    assert LayerNames(["layers.0", "layers.1", "head2"]).__repr__() == "layers.0\nlayers.1\nhead2"


def test_names_are_a_list_and_print_by_kind():
    names = LayerNames(f"experts.{i}.w{j}" for i in range(3) for j in (1, 2))
    assert names[:2] == ["experts.0.w1", "experts.0.w2"] and len(names) == 6
    assert repr(names) == "experts.*.w1 x 3\nexperts.*.w2 x 3" and told(names) == "experts.*.w1 x 3, experts.*.w2 x 3"
    assert repr(LayerNames()) == "no layer"


@pytest.mark.parametrize(
    ("values", "text"),
    [([22.13, 22.66, 22.4], "22.1 to 22.7"), ([22.13, 22.14], "22.1"), ([math.nan], ""), ([math.nan, 5.0], "5.0"), ([9.0, math.inf], "9.0 to exact")],
)
def test_a_spread_is_the_least_and_the_largest(values, text):
    assert decibels(values) == text


def test_a_table_has_no_column_that_is_empty_and_its_html_is_escaped():
    table = Table(("layer", "empty", "note"), [("a<b", "", "x"), ("c", "", "")], "title & all", ["below"])
    assert repr(table) == "title & all\nlayer  note\na<b    x\nc\nbelow"
    html = table._repr_html_()
    assert html.count("<tr>") == 3 and "a&lt;b" in html and "title &amp; all" in html and "empty" not in html
    assert repr(Table(("layer",), [], "none")) == "none"


class Decoder(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 96), "down": nn.Linear(96, 64)}) for _ in range(layers))
        self.head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x))
        return self.head(x)


def test_the_report_of_quantize_has_a_line_for_each_kind_and_all_layers_beside_it():
    report = lowbit.quantize_(Decoder(), lowbit.int8_weight_only(), lambda module, name: isinstance(module, nn.Linear) and name != "layers.3.up")
    lines = repr(report).splitlines()
    assert [line.split("  ")[0] for line in lines[2:6]] == ["layers.*.up x 5 of 6", "layers.3.up", "layers.*.down x 6", "head"]
    assert " to " in lines[2] and f"{5 * 96 * 64 * 4 / 1e3:.2f} kB" in lines[2], "the spread of their errors, the bytes of all"
    assert report._repr_html_().count("<tr>") == 5
    assert len(repr(report.layers).splitlines()) == len(report.rows) + 1 and "layers.5.down" in repr(report.layers)


def test_explain_dequantize_and_errors_fold_too():
    model = Decoder()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    explanation = lowbit.explain(model)
    assert "layers.*.up x 6" in repr(explanation) and "layers.4.up" not in repr(explanation)
    assert "layers.4.up" in repr(explanation.layers) and "<td" in explanation._repr_html_()
    assert repr(lowbit.dequantize_(model)) == "layers.*.up x 6\nlayers.*.down x 6\nhead"
    seen = lowbit.calibrate(model, [torch.randn(2, 64)], filter_fn=lambda module, name: name == "head")
    with pytest.raises(ValueError, match=r"got none of layers\.\*\.up x 6, layers\.\*\.down x 6$"):
        lowbit.quantize_(model, lowbit.int4_weight_only(32), calibration=seen)


def test_a_plan_folds_layers_that_get_the_same():
    def row(i: int, ms: float) -> PlanRow:
        spec = lowbit.int8_weight_only().spec(torch.float32)
        return PlanRow(f"layers.{i}.up", (96, 64), ((1, "float32", 4),), spec, "", 3.0, ms, 30.0 + i, 100, 25)

    plan = Plan([row(i, 1.0 + i / 2) for i in range(4)], 20.0)
    line = repr(plan).splitlines()[2]
    assert line.startswith("layers.*.up x 4") and "1.20x to 3.00x" in line and "30.0 to 33.0" in line
    assert len(repr(plan.layers).splitlines()) == 5
