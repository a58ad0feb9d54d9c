# SPDX-License-Identifier: Apache-2.0
"""autoquant with a timer that has no clock: what is recorded, which candidates are taken, what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import lowbit
from lowbit import _C
from lowbit.autotune import candidates, seen_layer, seen_linear
from lowbit.autotune.rows import fitting_rows
from lowbit.autotune.seen_layer import SAMPLE_ROWS
from lowbit.formats import FORMATS
from lowbit.quant import QuantLinear

W4 = lowbit.int4_weight_only(32)
INT8, W8A8 = lowbit.int8_weight_only(), lowbit.int8_dynamic_activation_int8_weight()
W4A8 = lowbit.int8_dynamic_activation_int4_weight(32)


def rows(plan):
    return {row.layer: row for row in plan.rows}


def test_shapes_are_recorded_with_how_often_they_came(block, x, make_plan):
    plan = make_plan(block, x, [INT8], {"int8": 5.0})
    assert rows(plan)["twice"].calls == ((20, "float32", 2),) and rows(plan)["once"].calls == ((20, "float32", 1),)
    assert rows(plan)["twice"].float_seconds == 20.0 and rows(plan)["twice"].seconds == 10.0
    assert rows(plan)["never"].spec is None and rows(plan)["never"].note == "was not called"
    assert not any(module._forward_pre_hooks for module in block.modules())


def test_the_model_is_left_as_it_was(block, x, make_plan):
    block.train()
    block.once.eval()
    before, wanted = copy.deepcopy(block.state_dict()), block(x)
    make_plan(block, x, [INT8, W4A8], {"int8": 5.0, "int4": 1.0})
    assert all(type(module) is nn.Linear for module in block.children())
    assert block.training and block.twice.training and not block.once.training
    assert not any("forward" in module.__dict__ for module in block.modules())
    assert torch.equal(block(x), wanted) and all(torch.equal(before[name], it) for name, it in block.state_dict().items())


def test_the_fastest_format_within_the_bound_is_taken(block, x, make_plan):
    seconds = {"int4": 1.0, "int8 per-channel": 4.0, "float32": 8.0}
    formats = [lowbit.float_weight(), INT8, W4A8]
    by_bound = {
        bound: {row.spec.format for row in make_plan(block, x, formats, seconds, bound).rows if row.spec}
        for bound in (-math.inf, 30.0, 80.0)
    }
    assert by_bound == {-math.inf: {"int4"}, 30.0: {"int8"}, 80.0: {"float32"}}


def test_a_format_that_wins_less_than_the_margin_is_not_taken(block, x, make_plan):
    assert not make_plan(block, x, [INT8], {"int8": 9.8}).specs
    assert len(make_plan(block, x, [INT8], {"int8": 9.6}).specs) == 2


def test_of_two_that_are_equally_fast_the_smaller_is_taken(block, x, make_plan):
    plan = make_plan(block, x, [INT8, W4A8], {"int4": 5.0, "int8": 5.0}, min_sqnr=-math.inf)
    assert {spec.format for spec in plan.specs.values()} == {"int4"}


def test_a_model_that_gets_slower_stays_float(block, x, make_plan):
    plan = make_plan(block, x, [INT8], {"int8": 5.0}, model_seconds=11.0)
    assert not plan.specs and plan.seconds == plan.float_seconds == 10.0 and plan.model_db == math.inf
    assert "note: the model as a whole was slower with the plan: every layer stays as it is" in repr(plan)


@pytest.mark.parametrize("slow_runs", range(7))
@pytest.mark.parametrize("winners", [{"float32": 1.0}, {"int8": 1.0}, {"int4": 1.0, "int8": 3.0, "float32": 5.0}])
def test_the_error_of_the_model_is_that_of_the_choice_that_is_kept(winners, slow_runs, make_plan, subtests):
    """Whatever won, was moved to hold the bound and went back to float: what applies has the error that the plan says."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval()
    x, formats = torch.randn(9, 64), [lowbit.float_weight(), INT8, W4A8]
    with torch.no_grad():
        wanted = model(x)
        for bound in (-math.inf, 20.0, 36.0, 100.0):
            with subtests.test(bound=bound):
                plan = make_plan(model, x, formats, winners, bound, model_seconds=[11.0] * slow_runs + [1.0])
                changed = copy.deepcopy(model)
                plan.apply(changed)
                noise = (wanted.double() - changed(x).double()).square().sum().item()
                db = 10 * math.log10(wanted.double().square().sum().item() / noise) if noise else math.inf
                assert db >= bound and plan.model_db == pytest.approx(db, abs=1e-6), (bound, plan)


def test_an_output_that_is_equal_bit_for_bit_is_exact_though_layers_changed(make_plan):
    """Small integers, whose sums are exact in any order: the dense format gives what torch gives."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randint(-3, 4, parameter.shape, generator=generator).float()
    x = torch.randint(-3, 4, (5, 64), generator=generator).float()
    plan = make_plan(model, x, [lowbit.float_weight()], {"float32": 5.0}, min_sqnr=1000.0)
    assert set(plan.specs) == {"0", "2"} and plan.model_db == math.inf and "exact" in repr(plan)


def other_row(m: int, spec, n: int = 64, k: int = 64) -> str:
    """A row that fits behind the one that is first."""
    first, *others = [
        row["name"]
        for row in _C.kernels("linear")
        if row["available"] and row["backend"] != "scalar"
        and _C.row_number("linear", row["name"])
        and any(it["chosen"] and it["name"] == row["name"]
                for it in _C.explain_linear(m, *spec.op_args(n, k), "float32", row=_C.row_number("linear", row["name"])))
    ]  # fmt: skip
    if not others:
        pytest.skip("this machine has one row for it")
    return others[0]


def test_a_row_is_preferred_only_where_it_wins(block, x, make_plan):
    row = other_row(20, INT8.spec(torch.float32))
    plan = make_plan(block, x, [INT8], {row: 3.0, "int8": 5.0})
    assert {it.row for it in plan.rows if it.spec} == {row} and rows(plan)["once"].seconds == 3.0
    assert not any(it.row for it in make_plan(block, x, [INT8], {row: 4.9, "int8": 5.0}).rows)
    plan.apply(block)
    assert block.once.row == row and block.never.weight.dtype == torch.float32
    block(x)
    assert _C.last_kernel("linear") == row
    assert row in repr(block.once) and {it.row for it in lowbit.explain(block, m=20)} == {row}


@pytest.mark.parametrize("config", (INT8, W8A8, W4A8, lowbit.float_weight()), ids=str)
def test_the_rows_of_a_call_are_those_that_serve_it_when_they_are_preferred(config):
    numbers = {row["name"]: _C.row_number("linear", row["name"]) for row in _C.kernels("linear") if row["available"]}
    call = (20, *config.spec(torch.float32).op_args(64, 96), "float32", "cpu")
    serve = {name for name, number in numbers.items() if _served(call, number) == name}
    assert set(fitting_rows(*call)) == {name for name in serve if not name.endswith("_scalar")}
    assert fitting_rows(*call)[0] == _served(call, 0)


def _served(call, number):
    return next(row["name"] for row in _C.explain_linear(*call, row=number) if row["chosen"])


@pytest.mark.parametrize("noise", [1.2, 1.45])
def test_a_row_that_wins_less_than_the_times_differ_is_not_taken_and_the_plan_says_so(block, x, make_plan, noise, monkeypatch):
    row = "linear_int8_scalar"
    monkeypatch.setattr(seen_linear, "fitting_rows", lambda *call: [*fitting_rows(*call)[:1], row])
    assert {it.row for it in make_plan(block, x, [INT8], {row: 4.3, "int8": 5.0}).rows if it.spec} == {row}
    plan = make_plan(block, x, [INT8], {row: 4.3, "int8": 5.0}, noise=noise)
    assert not any(it.row for it in plan.rows) and len(plan.specs) == 2
    assert f"times of the same call differ by {noise - 1:.0%}" in repr(plan) and "kernel rows keep their order" in repr(plan)
    assert "differ by" not in repr(make_plan(block, x, [INT8], {"int8": 5.0}))


def test_a_format_stays_that_is_not_slower_than_float_by_more_than_the_times_differ(block, x, make_plan):
    assert len(make_plan(block, x, [INT8], {"int8": 11.0}, noise=1.2, model_seconds=9.0).specs) == 2
    assert not make_plan(block, x, [INT8], {"int8": 13.0}, noise=1.2, model_seconds=9.0).specs


def test_times_that_say_nothing_are_taken_to_go_by_bytes(block, x, make_plan):
    formats = [lowbit.float_weight(), INT8, W8A8, lowbit.float_weight(torch.bfloat16)]
    plan = make_plan(block, x, formats, {"float32": 1.0, "bfloat16": 2.0, "int8": 30.0}, noise=9.0)
    assert {spec.name for spec in plan.specs.values()} == {W8A8.spec(torch.float32).name}
    assert "times of the same call differ by 800%, perhaps other programs run: they are taken to go by the bytes" in repr(plan)
    exact = make_plan(block, x, formats, {"float32": 1.0}, noise=9.0, min_sqnr=45.0)
    assert {spec.format for spec in exact.specs.values()} == {"bfloat16"}


def test_times_beside_other_programs_are_taken_to_go_by_bytes_named_and_not_kept(block, x, make_plan, tmp_path):
    """Both halves may agree on a call that waited in every round: once a float layer took 1226 times as long."""
    kept = tmp_path / "times.json"
    plan = make_plan(block, x, [lowbit.float_weight(torch.bfloat16), INT8, W8A8], {"bfloat16": 2.0, "int8": 0.01}, taken=0.5, cache=kept)
    assert "times say nothing, other programs took 50% of the CPU time: they are taken to go by the bytes" in repr(plan)
    assert "the model as a whole is not timed" in repr(plan) and math.isnan(plan.seconds) and not kept.exists()
    assert {row.note for row in plan.rows if row.spec} == {"by bytes"} and repr(plan).count("by bytes") >= 1
    assert all(row.float_seconds / row.seconds < 5 for row in plan.rows if row.spec)
    times, _ = plan.plot()
    assert "by bytes" in times.get_ylabel()
    again = make_plan(block, x, [INT8], {"int8": 5.0}, taken=0.1, cache=kept)
    assert kept.exists() and "by bytes" not in repr(again)


def test_the_example_that_a_recording_is_finalized_with_does_not_decide_by_its_time(block, x, make_plan):
    """It may be the prompt alone, which gets slower where the many steps behind it get faster."""
    plan = make_plan(block, x, [INT8], {"int8": 5.0}, model_seconds=11.0, recorded=True)
    assert len(plan.specs) == 2 and (plan.float_seconds, plan.seconds) == (10.0, 11.0)


def test_layers_that_share_a_weight_get_one_format(make_plan):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    plan = make_plan(model, torch.randn(5, 64), [INT8], {"int8": 5.0})
    first, second = plan.rows
    assert first.spec == second.spec is not None and second.note == "shares the weight of 0"
    assert first.calls == ((5, "float32", 2),) and second.bytes_after == second.seconds == 0
    plan.apply(model)
    assert model[0].weight is model[2].weight and isinstance(model[2], QuantLinear)


def test_layers_of_one_kind_are_timed_once(x, make_plan):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    plan = make_plan(model, x, [INT8], {"int8": 5.0})
    assert len(plan.specs) == 5 and len([names for names in plan.timer.sets if "float" in names]) == 1


def test_times_of_another_run_are_taken_from_the_file(block, x, make_plan, tmp_path):
    make_plan(block, x, [INT8], {"int8": 5.0}, cache=tmp_path / "times.json")
    plan = make_plan(block, x, [INT8], {"int8": 1.0}, cache=tmp_path / "times.json")
    assert rows(plan)["once"].seconds == 5.0 and all("float" not in names for names in plan.timer.sets)
    plan = make_plan(block, x, [INT8, W8A8], {"int8": 1.0}, cache=tmp_path / "times.json")
    assert rows(plan)["once"].seconds == 1.0, "a candidate that was not in the set: all are measured anew"


def test_every_format_of_the_list_is_a_candidate_but_those_that_prune(block, x, make_plan):
    dense = [cls for cls in FORMATS if not issubclass(cls, lowbit.SemiSparseWeightConfig)]
    specs = [config.spec(torch.float32) for config in candidates.default_candidates()]
    assert {cls().spec(torch.float32) for cls in dense} <= set(specs) and len(set(specs)) == len(specs)
    plan = make_plan(block, x, None, {})
    timed = {name.partition(" linear_")[0] for names in plan.timer.sets for name in names}
    assert {cls().spec(torch.float32).name for cls in dense} <= timed
    assert all(spec.format != "int8_semi_sparse" for spec in specs)


def test_quantized_layers_stay_and_are_named(block, x, make_plan):
    lowbit.quantize_(block, INT8, lambda module, name: name == "twice")
    plan = make_plan(block, x, [W8A8], {"int8": 5.0})
    assert rows(plan)["twice"].note == "already quantized as int8 per-channel" and set(plan.specs) == {"once"}
    plan.apply(block)
    assert block.twice.spec == INT8.spec(torch.float32) and block.once.spec == W8A8.spec(torch.float32)


def test_gated_mlps_are_planned_and_their_fused_form_is_left(gated_mlp, make_plan):
    mlp, x = gated_mlp["mlp"], torch.randn(4, 64)
    plan = make_plan(mlp, x, [W4A8], {"int4": 5.0}, min_sqnr=-math.inf)
    plan.apply(mlp)
    assert lowbit.fuse_gated_mlps(gated_mlp) == ["mlp"]
    with pytest.raises(ValueError, match="autoquant: model must have a linear layer that can be quantized, got none"):
        make_plan(gated_mlp["mlp"], x, [W4A8], {})


def test_the_filter_is_that_of_quantize_(block, x, make_plan):
    plan = make_plan(block, x, [INT8], {"int8": 5.0}, filter_fn=lambda module, name: name == "once")
    assert set(plan.specs) == {"once"} and rows(plan)["twice"].note == "not selected by filter_fn"
    with pytest.raises(TypeError, match="filter_fn must select nn.Linear and experts layers only"):
        make_plan(block, x, [INT8], {}, filter_fn=lambda module, name: True)


@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping"])
def test_an_example_is_a_tensor_arguments_or_keywords(block, x, make_plan, form):
    example = {"tensor": x, "tuple": (x,), "mapping": {"x": x}}[form]
    assert len(make_plan(block, example, [INT8], {"int8": 5.0}).specs) == 2


def test_padding_does_not_count_for_the_bound_of_the_model(make_plan):
    class Padded(nn.Module):
        """A layer whose results for padding are all noise once anything is rounded."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x, attention_mask):
            y = self.layer(x)
            rounded = type(self.layer.forward.__self__) is QuantLinear
            return torch.where(attention_mask[..., None] > 0, y, 9 + y) if rounded else y

    x, mask = torch.randn(2, 5, 64), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    plan = make_plan(Padded(), {"x": x, "attention_mask": mask}, [INT8], {"int8": 5.0})
    assert set(plan.specs) == {"layer"} and plan.model_db > 30
    assert not make_plan(Padded(), (x, mask), [INT8], {"int8": 5.0}).specs, "a mask without its name is any tensor"


class Loss:
    """The mean square of what a model is off its float output, above 1 as a loss is; counts its calls."""

    def __init__(self, model, x):
        self.x, self.wanted, self.calls = x, model(x).detach(), 0

    def __call__(self, model):
        assert not torch.is_grad_enabled() and not model.training
        self.calls += 1
        return 1 + (model(self.x) - self.wanted).square().mean()


@pytest.mark.parametrize("share", [1.5, 0.1, 1e-3, 1e-9])
@pytest.mark.parametrize("example", [True, False])
def test_a_figure_of_the_user_bounds_the_model_in_place_of_its_output(block, x, make_plan, share, example, tmp_path):
    loss = Loss(block, x)
    at_most = 1 + share * float(loss.wanted.square().mean()) / 100  # 1 is the noise of 20 dB, which int4 has
    times = {"int4": 2.0, "int8": 4.0, "float32": 8.0}
    plan = make_plan(
        block, x, [W4, INT8, lowbit.float_weight()], times, -math.inf, recorded=not example, whole=example,
        evaluate=loss, at_most=at_most,
    )  # fmt: skip
    figure = plan.evaluation
    assert figure.before == 1 and figure.after <= figure.at_most == at_most and loss.calls > 2
    chosen = {spec.format for spec in plan.specs.values()}
    assert "int4" in chosen if share > 1 else "int4" not in chosen
    assert f"evaluate: 1 -> {figure.after:.5g}, at most {at_most:.5g}" in repr(plan)
    plan.save(tmp_path / "plan.json")
    again = lowbit.Plan.load(tmp_path / "plan.json")
    assert again.evaluation == figure
    again.apply(block)
    with torch.no_grad():
        assert float(loss(block)) == pytest.approx(figure.after, rel=1e-6)


def test_a_figure_that_gives_no_bound_is_refused_and_the_model_stays(block, x, make_plan, subtests):
    calls = iter(range(9))
    for evaluate, at_most, error, text in [
        (lambda model: 3.0, 2.0, ValueError, "at_most must be more than evaluate gives for the float model, 3, got 2"),
        (lambda model: math.nan, 2.0, ValueError, "at_most must be more than evaluate gives"),
        (lambda model: next(calls), 2.0, ValueError, "evaluate must give the same twice for one model, got 0 and 1"),
        (lambda model: "low", 2.0, TypeError, "evaluate must return a number, got str"),
        (lambda model: torch.ones(3), 2.0, TypeError, "evaluate must return a number, got Tensor"),
    ]:
        with subtests.test(text), pytest.raises(error, match=f"autoquant: {text}"):
            make_plan(block, x, [INT8], {}, evaluate=evaluate, at_most=at_most)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in block.modules())


def test_a_choice_whose_figure_is_nan_is_not_taken(block, x, make_plan):
    def evaluate(model):
        return math.nan if any("forward" in vars(module) for module in model.modules()) else 1.0

    plan = make_plan(block, x, [INT8], {"int8": 5.0}, evaluate=evaluate, at_most=2.0)
    assert not plan.specs and plan.evaluation.after == 1


def test_encoder_layers_of_torch_are_recorded_and_measured_without_their_fused_path(make_plan):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    plan = make_plan(model, torch.randn(2, 7, 32), [INT8], {"int8": 5.0})
    assert set(plan.specs) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    assert "MultiheadAttention" in rows(plan)["layers.0.self_attn.out_proj"].note
    assert math.isfinite(plan.model_db), "the changed layers ran"
    assert model.layers[0].activation_relu_or_gelu == 1 and model.use_nested_tensor


def test_manual_records_what_the_user_runs(block, x, tmp_path):
    recording = lowbit.autoquant(block, manual=True, candidates=[INT8], cache=tmp_path / "times.json")
    recording(x)
    block(x[0])
    assert recording.twice is block.twice, "it stands in the place of the model"
    plan = recording.finalize()
    assert rows(plan)["twice"].calls == ((10, "float32", 2), (20, "float32", 2))
    assert math.isnan(plan.model_db) and "neither bounded nor timed" in repr(plan)
    assert not block.twice._forward_pre_hooks and type(block.twice) is nn.Linear
    with_example = lowbit.autoquant(block, manual=True, candidates=[INT8], cache=tmp_path / "times.json")
    block(x)
    assert not math.isnan(with_example.finalize(x).float_seconds)


def test_finalize_autoquant_is_torchaos_and_applies(block, x, tmp_path, monkeypatch):
    recording = lowbit.autoquant(block, manual=True, candidates=[INT8], cache=tmp_path / "times.json")
    recording(x)
    plan = recording.finalize_autoquant()
    assert [name for name, module in block.named_children() if isinstance(module, QuantLinear)] == list(plan.specs)


def test_a_sample_of_the_inputs_is_bounded_and_has_later_calls_too(block, tmp_path):
    recording = lowbit.autoquant(block, manual=True, candidates=[INT8], cache=tmp_path / "times.json")
    for step in range(40):
        block(torch.full((1 if step else 500, 64), float(step)))
    (sample,) = recording.layers[0].sampled()
    assert sample.shape == (SAMPLE_ROWS, 64) and len(sample[:, 0].unique()) > 10
    recording.close()


def test_nothing_called_is_an_error(block, x):
    with pytest.raises(ValueError, match="autoquant: the model must call a layer that can be quantized, got 3 that it did not call"):
        lowbit.autoquant(block, manual=True).finalize()


def test_a_model_that_is_not_reproducible_is_refused(x):
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(64)

    with pytest.raises(ValueError, match="must return the same twice for example_input, got -?\\d+.* dB"):
        lowbit.autoquant(nn.Sequential(nn.Linear(64, 64), Noisy(64, 64)), x, cache=False)


def test_autocast_is_refused_and_no_hook_stays(block, x):
    with torch.autocast("cpu"), pytest.raises(ValueError, match="the model must run without torch.autocast.* got a call of twice"):
        lowbit.autoquant(block, x)
    assert not any(module._forward_pre_hooks for module in block.modules()) and not block.training


def test_a_forced_row_leaves_nothing_to_choose(block, x):
    row = lowbit.kernels("linear")[-1]["name"]
    with lowbit.force_kernel(row), pytest.raises(ValueError, match=f"no row of linear may be forced, .* got {row}"):
        lowbit.autoquant(block, x)


def test_a_candidate_that_raises_is_left_out_and_noted(block, x, make_plan, monkeypatch):
    packed = seen_layer.pack_weight

    def refuses(weight, spec, inputs):
        if spec.format == "int4":
            raise RuntimeError("no paper left")
        return packed(weight, spec, inputs)

    monkeypatch.setattr(seen_layer, "pack_weight", refuses)
    plan = lowbit.autoquant(block, x, candidates=[INT8, W4A8], cache=False)
    assert any("int4 g32 int8-activations is left out, twice cannot be tried with it: no paper left" in note for note in plan.notes)
    assert all(spec.format == "int8" for spec in plan.specs.values())
    with pytest.raises(RuntimeError, match="no paper left"):
        lowbit.autoquant(block, x, candidates=[INT8, W4A8], cache=False, supress_autoquant_errors=False)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "example_input must be given, or manual=True"),
        ({"example_input": 1, "manual": True}, ValueError, "give example_input to finalize"),
        ({"manual": True, "mode": ["relu", None]}, ValueError, "mode must be \\['interpolate', 0.85\\]"),
        ({"manual": True, "min_sqnr": "high"}, ValueError, "min_sqnr must be a number of dB or None, got 'high'"),
        ({"manual": True, "min_sqnr": math.nan}, ValueError, "min_sqnr must be a number"),
        ({"manual": True, "at_most": 2.0}, ValueError, "evaluate must be given with at_most"),
        ({"manual": True, "evaluate": len}, ValueError, "at_most must be given with evaluate"),
        ({"manual": True, "evaluate": 3, "at_most": 2.0}, TypeError, "evaluate must be a function of the model, got int"),
        ({"manual": True, "evaluate": len, "at_most": math.inf}, ValueError, "at_most must be a finite number, got inf"),
        ({"manual": True, "candidates": []}, ValueError, "candidates must hold a configuration, got none"),
        ({"manual": True, "candidates": [8]}, TypeError, "candidates must hold configurations such as .* got int"),
        ({"manual": True, "candidates": "int8_weights"}, ValueError, "candidates: config: 'int8_weights' must begin with .*; the nearest"),
        ({"manual": True, "candidates": 8}, TypeError, "candidates must be a sequence of configurations, got int"),
        ({"manual": True, "candidates": [INT8], "qtensor_class_list": [INT8]}, ValueError, "candidates must be None with qtensor_class_list"),
        ({"manual": True, "qtensor_class_list": [lowbit.int8_weight_only]}, TypeError, "got Int8WeightOnlyConfig"),
    ],
)
def test_wrong_arguments_are_named(block, arguments, error, text):
    with pytest.raises(error, match=f"autoquant: .*{text}"):
        lowbit.autoquant(block, **arguments)
    assert not any(module._forward_pre_hooks for module in block.modules())


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="autoquant: model must be a torch.nn.Module, got function"):
        lowbit.autoquant(lambda x: x, torch.zeros(1))


def test_torchaos_own_classes_and_configurations_are_understood():
    torchao = pytest.importorskip("torchao.quantization")
    AQ = type("AQInt4G64WeightOnlyQuantizedLinearWeight", (), {})  # of 0.16, which is not here
    default = type("AQDefaultLinearWeight", (), {})
    found = candidates.candidates_of(None, [default, AQ, torchao.Int8WeightOnlyConfig()])
    assert [str(config) for config in found] == ["int4_weight_only(group_size=64)", "int8_weight_only(group_size=None, granularity=PerRow(dim=-1), scale='absmax')"]


def test_a_compiled_model_is_measured_as_the_model_in_it(block, x, make_plan):
    compiled = torch.compile(block, backend="eager")
    plan = lowbit.autoquant(compiled, x, candidates=[INT8], cache=False)
    assert {row.layer for row in plan.rows} == {"twice", "once", "never"}
    plan.apply(compiled)
    assert torch.equal(compiled(x), block(x))


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("head, wanted", [("int8", "int8 g32"), (None, "int4 g32"), (lowbit.int8_weight_only(64), "int8 g64")])
def test_the_head_has_8_bits_at_least(head, wanted, mixed, make_plan):
    seconds = {"int4": 1.0, "int8": 2.0}
    candidates = [lowbit.int4_weight_only(32), *([lowbit.int8_weight_only(32)] if mixed else [])]
    plan = make_plan(WithHead(), torch.randn(4, 64), candidates, seconds, min_sqnr=-math.inf, head=head)
    assert {row.layer: row.spec.name for row in plan.rows} == {"layer": "int4 g32", "head": wanted}
    model = WithHead()
    plan.apply(model)
    assert (model.layer.spec.name, model.head.spec.name) == ("int4 g32", wanted)
