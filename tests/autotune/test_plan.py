# SPDX-License-Identifier: Apache-2.0
"""The plan as a thing: table, HTML, JSON and back, picture, and applying it to models that fit and that do not."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import sys

import pytest
import torch
from torch import nn
from wrong_types import variants

import lowbit
from lowbit import _C
from lowbit.autotune.kv_choice import CacheChoice
from lowbit.autotune.plan_row import PlanRow
from lowbit.autotune.rows import alike
from lowbit.formats import LinearSpec
from lowbit.quant import QuantLinear

INT8, W4A8 = LinearSpec("int8"), LinearSpec("int4", 32, False, "int8_group")


def plan_of(model: nn.Module, **specs: LinearSpec) -> lowbit.Plan:
    """A plan as autoquant would make it."""
    rows = [
        PlanRow(name, (module.out_features, module.in_features), ((20, "float32", 2),), specs.get(name), "", 2.0, 0.5,
                31.5 if name in specs else math.inf, module.weight.nbytes, 1000)
        for name, module in model.named_children()
    ]  # fmt: skip
    cache = CacheChoice("int8", {"int8": 41.0, "int4": math.inf}, {"float": 100, "int8": 30, "int4": 15})
    return lowbit.Plan(rows, 20.0, 25.5, 1.5, 0.5, cache, notes=["<note>"])


def test_a_plan_prints_and_renders_as_a_table(block):
    plan = plan_of(block, twice=W4A8, once=INT8)
    text, page = repr(plan), plan._repr_html_()
    for words in ("2 of 3 layers", "int4 g32 int8-activations", "4.00x", "31.5", "25.5 dB", "3.00x float",
                  "KV cache: int8 (int8 41.0 dB, int4 inf dB)", "2 of 20 x float32"):  # fmt: skip
        assert words in text and words in page.replace("&quot;", '"'), words
    assert "note: <note>" in text and "&lt;note&gt;" in page and "<table>" in page


@pytest.mark.parametrize("bound", [20.0, -math.inf])
def test_a_plan_is_the_same_after_a_file(block, tmp_path, bound):
    plan = dataclasses.replace(plan_of(block, twice=W4A8, once=INT8), min_sqnr=bound)
    plan.save(tmp_path / "plan.json")
    assert lowbit.Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert "Infinity" not in (tmp_path / "plan.json").read_text(), "other programs read it too"


def test_a_format_that_no_file_could_give_back_is_not_saved(block, tmp_path):
    plan = plan_of(block, once=LinearSpec("int8", mapping=("search", 3)))
    with pytest.raises(ValueError, match=r"Plan: mapping of once must be text, a number or None to be saved, got \('search', 3\)"):
        plan.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def changed(plan: lowbit.Plan, **values) -> dict:
    made = plan.to_dict() | values
    return {name: value for name, value in made.items() if value != "gone"}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lowbit_plan": 2}, "plan.json: the version must be 1, got 2"),
        ({"lowbit_plan": "gone"}, "plan.json: a plan of lowbit.autoquant must be a dict with lowbit_plan"),
        ({"rows": "gone"}, "plan.json: plan must be an object with rows, got "),
        ({"colour": 1}, "plan must be an object without 'colour', got "),
        ({"rows": [{"layer": "a"}]}, r"plan.rows\[0\] must be an object with shape, got {'layer': 'a'}"),
        ({"rows": [[]]}, r"plan.rows\[0\] must be an object, got \[\]"),
        ({"min_sqnr": "twenty"}, "plan.min_sqnr must be a number, got 'twenty'"),
    ],
)
def test_another_file_is_refused(block, tmp_path, values, text):
    (tmp_path / "plan.json").write_text(json.dumps(changed(plan_of(block), **values)))
    with pytest.raises(ValueError, match=text):
        lowbit.Plan.load(tmp_path / "plan.json")


def test_a_value_of_a_wrong_type_is_refused_or_shown(block, subtests):
    kept = json.loads(json.dumps(plan_of(block, once=INT8).to_dict()))
    refused = 0
    for what, document in variants(kept):
        with subtests.test(what):
            try:
                plan = lowbit.Plan.from_dict(document)
            except ValueError:
                refused += 1
            else:
                assert repr(plan) and plan._repr_html_(), what
    assert refused > 200


@pytest.mark.parametrize("spec", [{"format": "int1"}, {"x_format": "int2"}, {"mapping": "stars"}, {"scale": "stars"}])
def test_a_format_that_is_not_here_names_its_layer(block, tmp_path, spec):
    values = plan_of(block, once=INT8).to_dict()
    next(row for row in values["rows"] if row["layer"] == "once")["spec"] |= spec
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="plan.json: once: .* must be one that this lowbit has, got"):
        lowbit.Plan.load(tmp_path / "plan.json")


def test_text_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match="Plan: .*plan.json"):
        lowbit.Plan.load(tmp_path / "plan.json")


def test_applying_does_what_quantize_does_layer_by_layer(block, x):
    by_hand = copy.deepcopy(block)
    report = plan_of(block, twice=W4A8, once=INT8).apply(block)
    lowbit.quantize_(by_hand, lowbit.int8_dynamic_activation_int4_weight(32), lambda module, name: name == "twice")
    lowbit.quantize_(by_hand, lowbit.int8_weight_only(), lambda module, name: name == "once")
    assert torch.equal(block(x), by_hand(x)) and type(block.never) is nn.Linear
    assert [row.layer for row in report.quantized] == ["twice", "once"] and len(report.rows) == 3
    assert report.model_bytes_after < report.model_bytes_before
    assert block.state_dict().keys() == by_hand.state_dict().keys()


def test_a_plan_without_changes_says_so(block):
    assert "leaves every layer as it is" in repr(plan_of(block).apply(block))


def names_left(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]


def test_every_layer_that_does_not_fit_is_named_before_a_change(block):
    plan = plan_of(block, twice=W4A8, once=INT8, never=INT8)
    block.once = nn.Linear(64, 40)
    block.never = nn.Identity()
    with pytest.raises(ValueError, match=r"once \(40 x 64, wanted 48 x 64\), never \(neither a linear layer nor experts\)"):
        plan.apply(block)
    del block.never
    lowbit.quantize_(block, lowbit.int8_weight_only(), lambda module, name: name == "twice")
    with pytest.raises(ValueError, match=r"twice \(already quantized as int8 per-channel\), .*never \(not there\)"):
        plan.apply(block)
    assert names_left(block) == ["twice"]


def test_a_weight_that_is_not_finite_is_found_before_a_change(block):
    with torch.no_grad():
        block.once.weight[3, 3] = math.nan
    with pytest.raises(ValueError, match="weight of once must be finite"):
        plan_of(block, twice=W4A8, once=INT8).apply(block)
    assert not names_left(block)


def test_a_row_of_another_build_is_refused_before_a_change(block):
    plan = plan_of(block, twice=W4A8)
    plan.rows[0] = dataclasses.replace(plan.rows[0], row="linear_int4_int8_abacus")
    with pytest.raises(ValueError, match="twice: row must be one that lowbit.kernels.. lists, got 'linear_int4_int8_abacus'; the nearest are linear_int4_int8_"):
        plan.apply(block)
    assert not names_left(block)


def test_a_row_that_serves_no_call_of_its_layer_is_refused_before_a_change(block):
    plan = plan_of(block, twice=W4A8, once=INT8)
    call = _C.explain_linear(20, *INT8.op_args(48, 64), "float32")
    rows = {row["name"] for row in call if row["chosen"] or row["reason"] == "a better row fits"}
    plan.rows[0] = dataclasses.replace(plan.rows[0], row=min(rows))  # of int8, for the layer in W4A8
    with pytest.raises(ValueError, match=rf"twice \({min(rows)} serves no int4 g32 int8-activations of its calls\)"):
        plan.apply(block)
    assert not names_left(block)
    plan.rows[0], plan.rows[1] = dataclasses.replace(plan.rows[0], row=""), dataclasses.replace(plan.rows[1], row=min(rows))
    plan.apply(block)
    assert block.once.row == min(rows)


@pytest.mark.parametrize("calls", [((20, "float32", 2),), ()], ids=["called", "not called"])
def test_a_row_of_another_format_is_refused_on_every_machine(calls, block):
    plan = plan_of(block, once=INT8)
    rows = [str(row["name"]) for row in _C.kernels("linear") if row["backend"] in _C.isa()["compiled"]]
    others = [name for name in rows if name.startswith("linear_int4_") and alike(name)]
    assert "linear_int4_avx2" in others
    for name in others:
        plan.rows[1] = dataclasses.replace(plan.rows[1], row=name, calls=calls)
        with pytest.raises(ValueError, match=rf"once \({name} serves no int8 per-channel of its calls\)"):
            plan.apply(block)
    plan.rows[1] = dataclasses.replace(plan.rows[1], spec=None)
    with pytest.raises(ValueError, match=r"once \(linear_int4_\w+ is preferred, and it stays float\)"):
        plan.apply(block)
    assert not names_left(block)


def test_a_line_too_many_or_too_few_is_refused_before_a_change(block):
    plan = plan_of(block, twice=W4A8, once=INT8)
    one = plan.rows.pop(0)
    with pytest.raises(ValueError, match=r"twice \(no line in the plan\)"):
        plan.apply(block)
    plan.rows += [one, one]
    with pytest.raises(ValueError, match="a layer must have one row, got several for twice"):
        plan.apply(block)
    assert not names_left(block)


def test_a_group_size_that_the_weight_cannot_have_is_named_with_file_and_layer(block, tmp_path):
    values = plan_of(block, twice=W4A8).to_dict()
    values["rows"][0]["spec"]["group_size"] = 33
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"plan.json: twice: .*group_size must be 32, .*got group_size=33"):
        lowbit.Plan.load(tmp_path / "plan.json")


def test_another_machine_is_said(block):
    plan = plan_of(block, twice=W4A8)
    plan.machine["cpu"] = "abacus"
    with pytest.warns(UserWarning, match=r"times are those of cpu abacus \(here .*another choice may be faster"):
        plan.apply(block)
    assert names_left(block) == ["twice"]


def test_the_picture_has_a_bar_of_each_layer_and_the_bound(block):
    pytest.importorskip("matplotlib").use("Agg")
    times, errors = plan_of(block, twice=W4A8, once=INT8).plot()
    assert len(times.patches) == 6 and [text.get_text() for text in errors.get_xticklabels()] == ["twice", "once", "never"]
    assert any(line.get_ydata()[0] == 20.0 for line in errors.lines)


def test_without_matplotlib_the_error_says_what_to_install(block, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'Plan.plot needs matplotlib: pip install "lowbit\[notebook\]"'):
        plan_of(block).plot()


def test_a_plan_in_the_place_of_the_model_says_what_to_do(block, x, subtests):
    """`model = autoquant(model, x)` is what users of torchao write."""
    model = plan_of(block, twice=INT8)
    with pytest.raises(TypeError, match=r"a plan cannot be called, .*plan\.apply\(model\) quantizes it in place"):
        model(x)
    for name in ("eval", "parameters", "generate", "state_dict", "config"):
        with subtests.test(name=name), pytest.raises(AttributeError, match=rf"a plan has no '{name}', .*plan\.apply\(model\)"):
            getattr(model, name)
    assert not hasattr(model, "forward") and repr(copy.deepcopy(model)) == repr(pickle.loads(pickle.dumps(model))) == repr(model)
