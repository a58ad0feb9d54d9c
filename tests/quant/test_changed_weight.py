# SPDX-License-Identifier: Apache-2.0
"""Quantizing a weight again that has changed a little, in every format: nothing moves without a change, and of a change
below a step of the codes most is kept, by codes or by scales."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lowbit import _C, HQQ
from lowbit.formats.spec import LinearSpec, StoredWeight
from lowbit.quant.changed_weight import Change, change_between, requantize
from lowbit.quant.codes import CodedWeight
from lowbit.quant.input_moments import InputMoments
from lowbit.quant.packing import pack_weight
from lowbit.quant.weight_grid import WeightGrid
from lowbit.testing.cases import formats_of_kind

N, K = 48, 320
FLOATS = [LinearSpec(format) for format in formats_of_kind("float")]
LOOKUPS = [LinearSpec(format, size) for format, size in itertools.product(formats_of_kind("lookup"), (0, 32))]
INTEGERS = [
    LinearSpec(format, size, mapping == "asymmetric", mapping=mapping)
    for format, size, mapping in itertools.product(
        formats_of_kind("integer"), (0, 32), ("symmetric", "asymmetric", "symmetric_no_clipping_err")
    )
]
HALF_QUADRATIC = LinearSpec("int4", 32, True, mapping="asymmetric", algorithm=HQQ())
CODED = [*LOOKUPS, *INTEGERS, HALF_QUADRATIC]
SPARSE = [LinearSpec(format, 32) for format in formats_of_kind("semi_sparse")]


def name_of(spec: LinearSpec) -> str:
    return f"{spec.name} {spec.mapping} {spec.algorithm or ''}".strip()


every = pytest.mark.parametrize("spec", [*FLOATS, *CODED, *SPARSE], ids=name_of)
coded = pytest.mark.parametrize("spec", CODED, ids=name_of)


def packed(spec: LinearSpec, scale: float = 1.0) -> tuple[nn.Parameter, StoredWeight, Tensor]:
    """A packed weight, its description and its values."""
    weight = scale * torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    return _packed(weight, spec)


def _packed(weight: Tensor, spec: LinearSpec) -> tuple[nn.Parameter, StoredWeight, Tensor]:
    stored = StoredWeight(spec, *weight.shape, _C.LAYOUT)
    made = pack_weight(weight, spec)[0]
    return made, stored, values(made, stored)


def values(weight: Tensor, stored: StoredWeight) -> Tensor:
    return torch.ops.lowbit.dequantize(weight, *stored.spec.weight_args(stored.n, stored.k))


def adapter(size: float, rank: int = 4) -> Tensor:
    """A change of this rank, whose root mean square is ``size``."""
    generator = torch.Generator().manual_seed(2)
    change = torch.randn(N, rank, generator=generator) @ torch.randn(rank, K, generator=generator)
    return size * change / change.square().mean().sqrt()


def kept(before: Tensor, wanted: Tensor, after: Tensor) -> float:
    change, moved = (wanted - before).double(), (after - before).double()
    return float((change * moved).sum() / change.square().sum())


@every
def test_a_change_of_nothing_is_nothing(spec: LinearSpec) -> None:
    weight, stored, before = packed(spec)
    assert requantize(weight, stored, before) is weight
    noise = before * (1 + 2.0**-23 * torch.randint(-2, 3, before.shape))
    assert requantize(weight, stored, noise) is weight
    change = change_between(weight, stored, weight, stored, noise)
    assert change.kept == 1 and change.change_db == -math.inf and change.error_db == math.inf and change.rows == 0


@pytest.mark.parametrize("spec", [spec for spec in [*CODED, *FLOATS] if spec.group_size or spec.is_float], ids=name_of)
def test_groups_that_do_not_change_keep_every_bit(spec: LinearSpec) -> None:
    weight, stored, before = packed(spec)
    change = adapter(0.3)
    touched = torch.zeros(N, -(-K // (spec.group_size or K)), dtype=torch.bool)
    touched[::3, ::2] = True
    change[~touched.repeat_interleave(spec.group_size or K, 1)[:, :K]] = 0
    after = requantize(weight, stored, before + change)
    if spec.is_float:
        assert torch.equal(values(after, stored)[~touched[:, 0]], before[~touched[:, 0]])
        return
    old, new = (CodedWeight.unpack(one.data, stored) for one in (weight, after))
    same = (old.codes == new.codes) | touched.repeat_interleave(spec.group_size, 1)[:, :K]
    assert same.all() and not torch.equal(old.codes, new.codes)
    assert torch.equal(old.scale[~touched], new.scale[~touched])
    assert torch.equal(old.zero_point[~touched], new.zero_point[~touched])
    rows = ~touched.any(1)
    assert torch.equal(values(after, stored)[rows], before[rows])


@pytest.mark.parametrize("spec", [*CODED, *FLOATS], ids=name_of)
@pytest.mark.parametrize("part", [0.1, 0.4, 1.0])
def test_most_of_a_change_below_a_step_is_kept(spec: LinearSpec, part: float) -> None:
    weight, stored, before = packed(spec)
    if spec.format == "float32":
        part *= 1024  # less is none
    wanted = before + adapter(part * step(spec, weight, stored))
    after = requantize(weight, stored, wanted)
    assert after.nbytes == weight.nbytes and after.shape == weight.shape
    result = values(after, stored)
    assert 0.8 <= kept(before, wanted, result) <= 1.1
    change = change_between(weight, stored, after, stored, wanted)
    assert change.kept == pytest.approx(kept(before, wanted, result), rel=1e-4)
    noise = (result - wanted).double().square().sum()
    assert change.error_db == pytest.approx(float(10 * (wanted.double().square().sum() / noise).log10()), abs=0.01)
    assert change.rows == N and change.unmoved == 0


def step(spec: LinearSpec, weight: Tensor, stored: StoredWeight) -> float:
    """The mean distance of a value from its neighbours."""
    if spec.is_float:
        return torch.finfo(getattr(torch, spec.format)).eps * float(values(weight, stored).abs().mean())
    grid, codes = WeightGrid.of(weight.data, stored)
    steps, lookup = grid.steps(), _C.FORMAT_FACTS[spec.format]["kind"] == "lookup"
    if not lookup:
        return float(steps.scale.abs().mean())
    levels = steps.levels[steps.order.int()].unique()
    at = torch.searchsorted(levels, steps.levels[grid.grouped(codes).int()].contiguous()).clamp(max=len(levels) - 2)
    return float((steps.scale * (levels[1:] - levels[:-1])[at]).abs().mean())


@coded
def test_a_large_change_is_rounded_as_well_as_a_new_weight(spec: LinearSpec) -> None:
    weight, stored, before = packed(spec)
    wanted = before + adapter(8.0)
    result = values(requantize(weight, stored, wanted), stored)
    new = values(pack_weight(wanted, spec)[0], stored)
    assert (result - wanted).norm() <= 1.5 * (new - wanted).norm()


@pytest.mark.parametrize("spec", [LinearSpec("int4", 32), LinearSpec("nf4", 32), LinearSpec("int8")], ids=name_of)
def test_the_product_with_inputs_of_the_change_is_nearer_than_by_rounding(spec: LinearSpec) -> None:
    weight, stored, before = packed(spec)
    change = adapter(0.1 * step(spec, weight, stored))
    wanted = before + change
    inputs = change.mT @ torch.randn(N, 16, generator=torch.Generator().manual_seed(3))
    result, rounded = (
        values(one, stored) for one in (requantize(weight, stored, wanted), pack_weight(wanted, spec)[0])
    )
    errors = [float(((one - wanted) @ inputs).norm() / (change @ inputs).norm()) for one in (result, rounded, before)]
    assert errors[0] < 0.25 and errors[0] < 0.5 * errors[1] and errors[2] == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("spec", [LinearSpec("int4", 32), LinearSpec("fp8_e4m3"), LinearSpec("int3", 32)], ids=name_of)
def test_a_calibration_keeps_the_outputs(spec: LinearSpec) -> None:
    weight, stored, before = packed(spec)
    wanted = before + adapter(0.2 * step(spec, weight, stored))
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(512, 24, generator=generator) @ torch.randn(24, K, generator=generator)
    inputs = InputMoments.zero(K, True)
    inputs.add(x)
    errors = [
        float(((values(requantize(weight, stored, wanted, given), stored) - wanted) @ x.T).norm())
        for given in (inputs, None)
    ]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("spec", [LinearSpec("int4", 32), LinearSpec("nf4", 32)], ids=name_of)
def test_rows_whose_change_is_too_small_are_counted(spec: LinearSpec) -> None:
    """Too small for the float16 scales of groups."""
    weight, stored, before = packed(spec)
    change = adapter(2e-5 * step(spec, weight, stored))
    change[::2] *= 4000
    after = requantize(weight, stored, before + change)
    counted = change_between(weight, stored, after, stored, before + change)
    moved = (values(after, stored) != before).any(1)
    assert counted.rows == N and counted.unmoved == int((~moved).sum()) and N // 4 < counted.unmoved <= N // 2


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
@pytest.mark.parametrize("spec", [LinearSpec("int4", 32), LinearSpec("int8"), LinearSpec("nf4", 32)], ids=name_of)
def test_extreme_values_and_rows_of_zeros(spec: LinearSpec, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    start = scale * torch.randn(N, K, generator=generator)
    start[:8], start[8:16, 32:64] = 0, 0
    weight, stored, before = _packed(start, spec)
    change = adapter(0.5 * scale)
    change[4:8] = 0
    wanted = before + change
    result = values(requantize(weight, stored, wanted), stored)
    assert result.isfinite().all() and not result[4:8].any()
    new = values(pack_weight(wanted, spec)[0], stored)
    for rows in (slice(0, 4), slice(8, 16), slice(16, N)):
        errors = [float(((one - wanted)[rows] / scale).norm()) for one in (result, new)]
        assert errors[0] <= 1.5 * errors[1]
    at_zero = requantize(*_packed(start, spec)[:2], torch.zeros(N, K))
    assert not values(at_zero, stored).any()


def test_a_row_that_grows_beyond_float16_is_split_anew() -> None:
    spec = LinearSpec("int4", 32)
    weight, stored, before = packed(spec, 1e-6)
    wanted = before.clone()
    wanted[3, :32] = torch.linspace(-1, 1, 32)
    result = values(requantize(weight, stored, wanted), stored)
    assert (result - wanted)[3, :32].abs().max() <= 1 / 8
    others = [row for row in range(N) if row != 3]
    assert torch.equal(result[others], before[others])


@pytest.mark.parametrize("spec", SPARSE, ids=name_of)
def test_a_sparse_weight_has_no_room(spec: LinearSpec) -> None:
    weight, stored, before = packed(spec)
    with pytest.raises(ValueError, match="merge: a weight must be dense"):
        requantize(weight, stored, before + 1)


def test_a_value_that_float16_does_not_hold_is_refused() -> None:
    weight, stored, before = packed(LinearSpec("float16"))
    with pytest.raises(ValueError, match="weight with the adapter in float16 must be finite"):
        requantize(weight, stored, before + 1e6)


def test_rows_in_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.quant import changed_weight, rounding_in_order, scale_fit

    spec = LinearSpec("int4", 32)
    weight, stored, before = packed(spec)
    of_step = step(spec, weight, stored)
    wanted = before + adapter(0.2 * of_step)
    whole = requantize(weight, stored, wanted)
    for module in (changed_weight, rounding_in_order, scale_fit):
        monkeypatch.setattr(module, "_NUMBERS", 7 * K)
    apart = values(requantize(weight, stored, wanted), stored) - values(whole, stored)
    assert (apart.abs() > 0.5 * of_step).float().mean() < 0.03  # sums in another order move a few codes


@pytest.mark.parametrize("spec", [replace(HALF_QUADRATIC, algorithm=None), HALF_QUADRATIC], ids=name_of)
def test_of_a_change_of_a_hundredth_of_a_step_scales_keep_what_they_can(spec: LinearSpec) -> None:
    """Codes stay; an error of more than the change appears only where inputs are not."""
    weight, stored, before = packed(spec)
    change = adapter(0.01 * step(spec, weight, stored), rank=2)
    after = requantize(weight, stored, before + change)
    old, new = (CodedWeight.unpack(one.data, stored) for one in (weight, after))
    assert torch.equal(old.codes, new.codes) and not torch.equal(old.scale, new.scale)
    assert kept(before, before + change, values(after, stored)) >= 0.8
    x = torch.randn(512, 3, generator=torch.Generator().manual_seed(4)) @ torch.randn(
        3, K, generator=torch.Generator().manual_seed(5)
    )
    inputs = InputMoments.zero(K, True)
    inputs.add(x)
    after = requantize(weight, stored, before + change, inputs)
    errors = (values(after, stored) - before - change) @ x.T
    assert errors.norm() < 0.3 * (change @ x.T).norm()
    of_inputs = change_between(weight, stored, after, stored, before + change, inputs)
    alone = change_between(weight, stored, after, stored, before + change)
    assert of_inputs.kept > 0.9 > alone.kept


@coded
def test_the_nearest_value_is_the_nearest_of_all(spec: LinearSpec) -> None:
    weight, stored, before = packed(spec)
    grid, codes = WeightGrid.of(weight.data, stored)
    assert torch.equal(grid.decode(codes), before)
    wanted = before + 0.7 * torch.randn(N, K, generator=torch.Generator().manual_seed(5))
    found = grid.decode(grid.nearest(wanted)).double()
    every = [
        grid.decode(torch.full_like(codes, code)).double()
        for code in range(_C.FORMAT_FACTS[spec.format]["code_max"] + 1)
    ]
    least = torch.stack([(one - wanted).abs().nan_to_num(torch.inf) for one in every]).amin(0)
    torch.testing.assert_close((found - wanted).abs(), least, rtol=1e-5, atol=1e-6)


def test_changes_add_up() -> None:
    both = Change(4, 2, 1, 1, 3, 1) + Change(6, 2, 3, 0, 1, 0)
    assert both == Change(10, 4, 4, 1, 4, 1) and both.kept == 1 and both.change_db == pytest.approx(-3.9794, abs=1e-4)
