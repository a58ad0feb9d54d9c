# SPDX-License-Identifier: Apache-2.0
"""bfloat16 parameters with 8-bit corrections: the bits of the reference on every row, for every rule and state format."""

from __future__ import annotations

import math

import pytest
import torch
from row_fixture import fixture_of
from torch import Tensor

from lowbit import testing
from lowbit.reference import optim as reference
from lowbit.testing import ROUNDOFF, STATE_FORMATS, Moment, assert_within
from lowbit.testing.optim_problem import RULES, Problem

ROWS = [row for row in testing.rows("optim_step") if row["device"] == "cpu"]  # others refuse corrections by name
row = fixture_of(ROWS)
pytestmark = pytest.mark.skipif(not ROWS, reason="not compiled")
NUMELS = (1, 15, 16, 17, 31, 33, 64, 65, 129, 300, 1000, 4099)
STEPPED = [name for name in RULES if not name.startswith("muon")]  # muon's first step has no parameters


def corrections_of(params: list[Tensor], seed: int = 5) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(-128, 128, param.shape, generator=random, dtype=torch.int8) for param in params]


def problem_of(name: str, format: str, grad: str = "bfloat16") -> tuple[Problem, list[Tensor]]:
    problem = Problem(name, format, 64, NUMELS, [("bfloat16", grad)])
    return problem, corrections_of(problem.params)


def format_of(row: str) -> str:
    return next(format for format in STATE_FORMATS if f"_{format}_" in row)


@pytest.mark.core
@pytest.mark.parametrize("name", STEPPED)
def test_a_step_is_that_of_the_float32_values_split_as_the_reference_does(row: str, name: str, subtests: pytest.Subtests) -> None:
    for grad in ("bfloat16", "float32"):
        with subtests.test(grad=grad):
            problem, corrections = problem_of(name, format_of(row), grad)
            exact, _ = problem_of(name, format_of(row), grad)
            exact.params = [reference.corrected(*both).float() for both in zip(problem.params, corrections, strict=True)]
            wanted = exact.wanted()
            problem.run(row, corrections=corrections)
            exact.run(row)
            for index, values in enumerate(exact.params):
                p, correction = reference.split(values, int(exact.steps[index]))
                assert torch.equal(problem.params[index], p), index
                assert torch.equal(corrections[index], correction), index
                new, allowed = wanted[index][:2]
                both = reference.corrected(problem.params[index], corrections[index])
                assert_within(both, new, allowed + 2.0**-15 * new.abs(), f"{row} {name} {index}")
                assert_within(p, both, ROUNDOFF["bfloat16"] * both.abs() + 2.0**-133, f"{row} {name} {index}: nearest")
            for ours, theirs in zip(problem.everything()[len(NUMELS):], exact.everything()[len(NUMELS):], strict=True):
                assert torch.equal(ours, theirs)  # moments and step counts


def test_the_largest_and_the_smallest_values_and_nan(row: str) -> None:
    values = [0.0, -0.0, 2.0**-149, 2.0**-133, -(2.0**-126), 3.3895e38, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 1 - 2.0**-24]
    whole = torch.tensor([*values, *[value * (1 + 2.0**-12) for value in values]])
    whole = torch.cat([whole, torch.tensor([-1, 0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)])
    params, corrections = reference.split(whole, 0)
    exact = reference.corrected(params, corrections).float()
    again, grads = params.clone(), torch.zeros_like(params)
    moments = [[Moment.zeros((len(whole),), format_of(row), True, 64)]]
    hyper = RULES["lion"] | dict(weight_decay=0.0)
    testing.run_optim("lion", [again], [grads], moments, [torch.tensor(0.0)], hyper, format=format_of(row), block_size=64, row=row, corrections=[corrections])
    assert torch.equal(again, params) or torch.equal(again.isnan(), params.isnan()) and torch.equal(again[~again.isnan()], params[~again.isnan()])
    kept = exact.isfinite()
    assert torch.equal(reference.corrected(again, corrections).float()[kept], exact[kept])
    assert params[-3:].isnan().all() and again[-3:].isnan().all()


def test_a_parameter_set_to_zero_has_an_old_correction_and_stays_a_number(row: str) -> None:
    for sign in (1.0, -1.0):
        params = torch.zeros(256, dtype=torch.bfloat16) * sign
        corrections = torch.arange(-128, 128).to(torch.int8)
        moments = [[Moment.zeros((256,), format_of(row), True, 64)]]
        arguments = dict(format=format_of(row), block_size=64, row=row, corrections=[corrections])
        testing.run_optim("lion", [params], [torch.zeros(256)], moments, [torch.tensor(0.0)], RULES["lion"], **arguments)
        assert (params == 0).all() and reference.corrected(params, corrections).abs().max() < 2.0**-133


@pytest.mark.parametrize("update", [2.0**-10, 1e-4, 3e-5, 2.0**-17, 2.0**-20])
def test_equal_updates_of_any_size_add_up(update: float) -> None:
    """1000 steps: rounding to nearest in 24 bits would lose the last two, which are less than half of 2**-15."""
    params, start = [torch.full((4096,), 1.25, dtype=torch.bfloat16)], 1.25
    corrections, grad, step = [torch.zeros(4096, dtype=torch.int8)], torch.full((4096,), -1.0), torch.tensor(0.0)
    hyper = RULES["sgd-plain"] | dict(weight_decay=0.0, lr=update)
    for _ in range(1000):
        testing.run_optim("sgd", params, [grad], [], [step], hyper, format="float32", corrections=corrections)
    moved = reference.corrected(params[0], corrections[0]) - start
    # a sequence of Weyl is even to a few units; float32 rounds each sum to 2**-23, here always in one direction
    assert (moved - 1000 * update).abs().max() < 8 * 2.0**-15 + 1000 * 2.0**-24


def test_found_inf_keeps_parameters_and_corrections() -> None:
    problem, corrections = problem_of("adamw", "dynamic8")
    before, kept = problem.everything(), [each.clone() for each in corrections]
    problem.run(found_inf=torch.tensor(1.0), corrections=corrections)
    assert all(torch.equal(*both) for both in zip(problem.everything() + corrections, before + kept, strict=True))


def test_bad_corrections_are_refused_before_anything_changes() -> None:
    problem, corrections = problem_of("adamw", "dynamic8")
    before = problem.everything()
    for change, error, message in (
        (lambda: corrections[:-1], ValueError, "corrections must have 12 entries, got 11"),
        (lambda: [*corrections[:-1], corrections[-1][:-1]], ValueError, r"corrections\[11\] must have 4099 elements"),
        (lambda: [*corrections[:-1], corrections[-1].to(torch.uint8)], TypeError, r"corrections\[11\] must be int8, got uint8"),
    ):
        with pytest.raises(error, match=message):
            problem.run(corrections=change())
    with pytest.raises(ValueError, match="seed must be None for parameters with corrections"):
        problem.run(corrections=corrections, seed=1)
    problem.params[0] = problem.params[0].float()
    with pytest.raises(TypeError, match=r"params\[0\] must be bfloat16 to have a correction, got float32"):
        problem.run(corrections=corrections)
    assert all(torch.equal(*both) for both in zip(problem.everything()[1:], before[1:], strict=True))
