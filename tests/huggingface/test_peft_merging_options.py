# SPDX-License-Identifier: Apache-2.0
"""lowbit.merging and its report, and merges of adapters in every format of a linear layer."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import QuantLinear
from lowbit.formats.spec import LinearSpec
from lowbit.quant.permuted_linear import PermutedLinear, hold_permutation
from lowbit.testing.cases import format_cases

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
from peft_methods import adapted, bases, config_of, numbers, packed  # noqa: E402

SPECS = [
    LinearSpec(format, size, mapping == "asymmetric", x_format, mapping)
    for format, size, mapping, x_format in format_cases()
    if size in (0, 32)
]


def linear(spec: LinearSpec, n: int = 48, k: int = 64) -> QuantLinear:
    torch.manual_seed(0)
    return QuantLinear.from_linear(nn.Linear(k, n), spec)


def lora(model: nn.Module, size: float | None = None, **options: Any) -> Any:
    """The model with a LoRA, which is zero without a ``size``, the deviation of its last matrix."""
    torch.manual_seed(1)
    targets = [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name and size is not None:
            nn.init.normal_(parameter.data, std=size)
    return model


def test_every_format_takes_a_zero_adapter_bit_for_bit_and_keeps_a_light_one(subtests: Any) -> None:
    for spec, dora in itertools.product(SPECS, (False, True)):
        with subtests.test(spec=spec, dora=dora):
            model = nn.Sequential(linear(spec))
            weight = model[0].weight
            zero = lora(model, use_dora=dora)
            zero.merge_adapter()
            assert bases(zero)["base_model.model.0"].weight is weight
            model = lora(nn.Sequential(linear(spec)), 0.02, use_dora=dora)
            with lowbit.merging() as report:
                merged = model.merge_and_unload()
            (row,) = report.rows
            assert row.layer == "0" and row.format == spec.name and row.bytes_after == row.bytes_before
            fine = not spec.format.startswith(("int2", "int3"))  # whose steps are 30 times the change and more
            assert row.kept >= (0.8 if fine else 0) and merged[0].spec == spec


def test_the_report_names_layers_and_prints() -> None:
    model = adapted(packed(), config_of("LORA"))
    with lowbit.merging() as report:
        plain = model.merge_and_unload()
    names = [name for name, module in plain.named_modules() if name.endswith(("q_proj", "v_proj", "down_proj"))]
    assert [row.layer for row in report.rows] == names
    assert all(row.kept >= 0.8 and row.error_db > 20 and row.change_db < 0 for row in report.rows)
    text = repr(report)
    assert text.startswith("6 layers merged") and "kept" in text and "change dB" in text and "int8 g32" in text
    assert report.layers[names[0]].layer == names[0] and "<table" in report._repr_html_()
    assert report.to_dict()["rows"][0]["kept"] == report.rows[0].kept
    assert report.bytes_before == report.bytes_after == report.to_dict()["bytes_after"]
    with lowbit.merging() as report:
        pass
    assert repr(report).strip().startswith("no packed layer was merged")


def test_what_is_lost_is_told_without_a_report_and_within_it() -> None:
    make: Callable[[], Any] = lambda: lora(nn.Sequential(linear(LinearSpec("int4", 32))), 1e-6)  # noqa: E731
    with pytest.warns(UserWarning, match=r"merge_and_unload: 1 layers keep less than 80% of their change, .*: 0\. "):
        make().merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lowbit.merging() as report:
            merged = make().merge_and_unload()
    (row,) = report.lost
    assert row.kept == 0 and row.unmoved == 1 and "keep less than 80% of their change" in repr(report)
    assert torch.equal(merged[0].weight, linear(LinearSpec("int4", 32)).weight)


@pytest.mark.parametrize(
    "config",
    [lowbit.int8_weight_only(32), lowbit.float_weight(torch.bfloat16), lowbit.float_weight(torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("start", [LinearSpec("int4", 32), LinearSpec("int8_semi_sparse")], ids=str)
def test_layers_that_cannot_keep_the_change_take_another_format_if_told(config: Any, start: LinearSpec) -> None:
    def make() -> Any:
        model = nn.Sequential(linear(LinearSpec("int8")), nn.Linear(48, 64))
        lowbit.quantize_(model[1], lowbit.int8_weight_only())
        model[1] = linear(start, 64, 48)
        model = lora(model, 0.02)
        model.base_model.model[1].lora_B["default"].weight.data *= 3e-3 if start.format == "int4" else 1
        return model

    model, x = make(), torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    before, base = numbers(model), bases(model)["base_model.model.1"]
    with lowbit.merging(format=config) as report:
        model.merge_adapter()
    first, second = report.rows
    assert first.note == "" and second.note.startswith(f"was {start.name}") and second.bytes_after > second.bytes_before
    assert base.spec.format == config.spec(torch.float32).format and second.format == base.spec.name
    assert ("float now" in second.note) == base.spec.is_float and second.kept >= (0.95 if base.spec.is_float else 0.8)
    with torch.no_grad():
        assert model(x).isfinite().all()
    model.unmerge_adapter()
    assert base.spec == start and all(torch.equal(value, before[name]) for name, value in numbers(model).items())
    with lowbit.merging(format=config):
        plain = model.merge_and_unload()
    state = plain.state_dict()
    fresh = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    lowbit.load(fresh, state)
    with torch.no_grad():
        assert torch.equal(fresh(x), plain(x))


def test_a_call_that_fails_gives_formats_back() -> None:
    model = nn.Sequential(linear(LinearSpec("int8_semi_sparse")), linear(LinearSpec("int4", 32), 64, 48))
    model = lora(model, 0.02)
    model.base_model.model[1].lora_B["default"].weight.data[0, 0] = torch.inf
    before, specs = numbers(model), [base.spec for base in bases(model).values()]
    with (
        lowbit.merging(format=lowbit.int8_weight_only(32)) as report,
        pytest.raises(ValueError, match="1 cannot be merged"),
    ):
        model.merge_and_unload()
    assert [base.spec for base in bases(model).values()] == specs and not report.rows
    assert all(torch.equal(value, before[name]) for name, value in numbers(model).items())


def test_a_calibration_keeps_outputs_by_batches_or_given() -> None:
    def make() -> Any:
        return lora(
            nn.Sequential(linear(LinearSpec("int4", 32), 64, 128), linear(LinearSpec("int4", 32), 32, 64)), 0.005
        )

    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(64, 8, generator=generator) @ torch.randn(8, 128, generator=generator) for _ in range(2)]
    plain = nn.Sequential(linear(LinearSpec("int4", 32), 64, 128), linear(LinearSpec("int4", 32), 32, 64))
    given = lowbit.calibrate(plain, batches, hessian=True)
    x = torch.cat(batches)
    with torch.no_grad():
        wanted = make()(x)
        errors: list[float] = []
        for calibration in (None, batches, given, lowbit.calibrate(make(), batches, hessian=True)):
            with lowbit.merging(calibration=calibration) as report:
                merged = make().merge_and_unload()
            errors.append(float((merged(x) - wanted).norm() / wanted.norm()))
            assert [row.layer for row in report.rows] == ["0", "1"]
    assert max(errors[1:]) < 0.6 * errors[0]


def test_wrong_options_are_refused_before_anything_changes() -> None:
    for calibration in (torch.ones(2), {"a": 1}, "text", 3):
        with (
            pytest.raises(TypeError, match="merging: calibration must be of lowbit.calibrate"),
            lowbit.merging(calibration),
        ):
            pass
    with (
        pytest.raises(TypeError, match="merging: format must be a configuration .*got str"),
        lowbit.merging(format="int8"),
    ):
        pass
    sparse = lowbit.int8_dynamic_activation_int8_semi_sparse_weight()
    with pytest.raises(ValueError, match="merging: format must have room"), lowbit.merging(format=sparse):
        pass
    model = lora(nn.Sequential(linear(LinearSpec("int4", 32))), 0.02)
    before = numbers(model)
    plain, x = nn.Sequential(linear(LinearSpec("int4", 32))), [torch.randn(4, 64)]
    other = lowbit.calibrate(nn.Sequential(nn.Identity(), nn.Linear(64, 8)), x, hessian=True)
    wrong: list[tuple[Any, str]] = [
        (lowbit.calibrate(plain, x), "hessian=True"),
        (other, "must have seen every merged layer, got none of 0"),
        (lowbit.calibrate(nn.Sequential(nn.Linear(8, 8)), [torch.randn(4, 8)], hessian=True), "must be of k=64, got 8"),
    ]
    for calibration, message in wrong:
        with lowbit.merging(calibration), pytest.raises(ValueError, match=message):
            model.merge_adapter()
    assert all(torch.equal(value, before[name]) for name, value in numbers(model).items())


def test_options_end_with_their_block_and_are_of_one_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def rows(size: float) -> Tensor:
        with lowbit.merging() as report:
            lora(nn.Sequential(linear(LinearSpec("int8"))), size).merge_and_unload()
        return torch.tensor([row.kept for row in report.rows])

    with lowbit.merging() as outer, ThreadPoolExecutor(2) as pool:
        assert [len(found) for found in pool.map(rows, [0.01, 0.02])] == [1, 1]
    assert not outer.rows
    lora(nn.Sequential(linear(LinearSpec("int8"))), 0.02).merge_and_unload()
    assert not outer.rows


@pytest.mark.parametrize("calibrated", [False, True])
def test_columns_in_another_order_keep_the_change_of_their_inputs(calibrated: bool) -> None:
    """As GPTQ's act order stores them: the adapter and the calibration are in the order of the inputs."""
    torch.manual_seed(2)
    model = nn.Sequential(linear(LinearSpec("int4", 32)))
    permutation = torch.randperm(64)
    hold_permutation(model[0], permutation)
    x = torch.randn(256, 64) * torch.linspace(0.1, 3, 64)
    kept = model[0].weight
    lora(model).merge_and_unload()
    assert torch.equal(model[0].weight, kept) and torch.equal(model[0].permutation, permutation)
    adapted_model = lora(model, 0.05)
    wanted, plain = adapted_model(x), model[0].base_layer(x)
    with lowbit.merging(calibration=[x] if calibrated else None) as report:
        merged = adapted_model.merge_and_unload()
    assert type(merged[0]) is PermutedLinear and report.rows[0].kept >= 0.7
    assert (merged(x) - wanted).norm() < (0.5 if calibrated else 0.8) * (wanted - plain).norm()
