# SPDX-License-Identifier: Apache-2.0
"""One step of every rule in every state format against float64, on every row; threads, skipping, rounding, nan."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from row_fixture import fixture_of
from settings import same_for_any_threads

import lowbit
from lowbit import _C, testing
from lowbit.reference import optim as reference
from lowbit.testing import HYPER, STATE_FORMATS, Moment, moments_of, run_optim
from lowbit.testing.optim_problem import RULES, Problem, rule_of

ROWS = [row for row in testing.rows("optim_step")]
AVAILABLE = [str(row["name"]) for row in ROWS if row["available"]]
FLOAT_MAX = torch.finfo(torch.float32).max
NUMELS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 1000, 4099)
DTYPES = list(itertools.product(testing.DTYPES, testing.DTYPES))


def row_of(format: str, isa: str | None = None) -> str | None:
    """The row of this format for an instruction set: the first that runs here when none is named."""
    for row in ROWS:
        if f"_{format}_" in str(row["name"]) and row["available"] and isa in (None, row["backend"]):
            return str(row["name"])
    return None


row = fixture_of(ROWS)


def format_of(row: str) -> str:
    return next(format for format in STATE_FORMATS if f"_{format}_" in row)


@pytest.mark.core
@pytest.mark.parametrize("name", RULES)
def test_step_is_within_budget_of_the_float64_reference(row: str, name: str, subtests: pytest.Subtests) -> None:
    format = format_of(row)
    for block_size in (64, 256, 4096):
        with subtests.test(block_size=block_size):
            problem = Problem(name, format, block_size, NUMELS, [("float32", "float32")], seed=block_size)
            wanted = problem.wanted()
            before = [float(step) for step in problem.steps]
            problem.run(row)
            problem.check_against(wanted, f"{row} {name} {block_size}")
            assert [float(step) for step in problem.steps] == [step + 1 for step in before]


@pytest.mark.parametrize("name", RULES)
def test_every_pair_of_parameter_and_gradient_dtype(row: str, name: str) -> None:
    problem = Problem(name, format_of(row), 128, tuple(100 + i for i in range(9)), DTYPES)
    wanted = problem.wanted()
    problem.run(row)
    problem.check_against(wanted, f"{row} {name}")


@pytest.mark.parametrize("name", RULES)
def test_first_step_from_zeros(row: str, name: str) -> None:
    problem = Problem(name, format_of(row), 64, (1, 100, 1000), [("float32", "float32"), ("bfloat16", "bfloat16")], step=0)
    for step in problem.steps:
        step.zero_()
    for each in problem.moments:
        for i, moment in enumerate(each):
            each[i] = Moment.zeros((moment.numel,), moment.format, moment.signed, moment.block_size)
    wanted = problem.wanted()
    problem.run(row)
    problem.check_against(wanted, f"{row} {name}")


@pytest.mark.parametrize("format", STATE_FORMATS)
@pytest.mark.parametrize("name", ["adamw", "amsgrad", "sgd-nesterov", "lion"])
def test_rows_of_a_format_agree_bit_for_bit(format: str, name: str) -> None:
    results = []
    for isa in dict.fromkeys(row["backend"] for row in ROWS):
        if row := row_of(format, str(isa)):
            problem = Problem(name, format, 256, NUMELS, DTYPES)
            problem.run(row)
            results.append((row, problem.everything()))
    assert len(results) > 1
    for row, tensors in results[1:]:
        for ours, first in zip(tensors, results[0][1], strict=True):
            assert torch.equal(ours, first), (row, results[0][0])


@pytest.mark.parametrize("format", STATE_FORMATS)
@pytest.mark.parametrize("seed", [None, 7])
def test_result_does_not_depend_on_the_number_of_threads(format: str, seed: int | None) -> None:
    def stepped() -> list[torch.Tensor]:
        problem = Problem("adamw", format, 256, (100_003, 17, 40_000), DTYPES)
        problem.run(seed=seed)
        return problem.everything()

    same_for_any_threads(stepped, (1, 2, 5))


@pytest.mark.parametrize("format", STATE_FORMATS)
def test_a_list_is_the_same_as_its_tensors_one_by_one(format: str) -> None:
    together, alone = (Problem("adamw", format, 128, NUMELS, DTYPES) for _ in range(2))
    together.run()
    for i in range(len(NUMELS)):
        moments = [[each[i]] for each in alone.moments]
        run_optim("adamw", [alone.params[i]], [alone.grads[i]], moments, [alone.steps[i]], alone.hyper, format=format, block_size=128)
    assert all(torch.equal(a, b) for a, b in zip(together.everything(), alone.everything(), strict=True))


def test_float32_states_follow_torchs_own_optimizers() -> None:
    torch.manual_seed(3)
    start, grads = torch.randn(1000), torch.randn(5, 1000)
    for name, theirs in {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, maximize=True),
        "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.0, 0.99), weight_decay=0.0, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
        "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        "sgd-dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3, maximize=True),
        "sgd-plain": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
    }.items():
        rule, hyper = rule_of(name), RULES[name]
        ours, parameter = start.clone(), torch.nn.Parameter(start.clone())
        moments = [[Moment.zeros((1000,), "float32", True, 256)] for _ in moments_of(rule, hyper)]
        optimizer, step = theirs([parameter]), [torch.tensor(0.0)]
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step()
            run_optim(rule, [ours], [grad.clone()], moments, step, hyper, format="float32")
        torch.testing.assert_close(ours, parameter.data, rtol=4e-6, atol=4e-6, msg=name)  # five steps of 1e-2: torch's own variants differ as much


@pytest.mark.parametrize("isa", dict.fromkeys(row["backend"] for row in ROWS if row["available"]))
def test_gradients_of_every_size_follow_torch(isa: str) -> None:
    """Up to the largest float32. A second moment of more is inf, which leaves the element as it is; here only from the next
    step on, where it is at most 4 times as large."""
    sizes = 10 ** torch.arange(-44, 38.3, 0.125, dtype=torch.float64)
    grads = [torch.cat([sizes, -sizes]).float() * factor for factor in (1.0, 0.3, 1.0, 1e-6)]
    for name, theirs in {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
        "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.0, 0.99), weight_decay=0.0, amsgrad=True),
    }.items():
        rule, hyper = rule_of(name), RULES[name]
        ours, parameter = torch.ones(grads[0].shape), torch.nn.Parameter(torch.ones(grads[0].shape))
        moments = [[Moment.zeros(tuple(ours.shape), "float32", True, 256)] for _ in moments_of(rule, hyper)]
        optimizer, step = theirs([parameter]), [torch.tensor(0.0)]
        square, same = torch.zeros(ours.shape, dtype=torch.float64), torch.ones(ours.shape, dtype=torch.bool)
        with lowbit.force_kernel(row_of("float32", isa)):
            for grad in grads:
                parameter.grad = grad.clone()
                optimizer.step()
                run_optim(rule, [ours], [grad.clone()], moments, step, hyper, format="float32")
                square = 0.99 * square + 0.01 * grad.double().square()
                same &= (square < 0.99 * FLOAT_MAX) | (square > 4 * FLOAT_MAX)
                torch.testing.assert_close(ours[same], parameter.data[same], rtol=4e-6, atol=4e-6)
        assert same.float().mean() > 0.98


def test_lion_with_gradients_of_every_size() -> None:
    sizes = 10 ** torch.arange(-44, 38.3, 0.125, dtype=torch.float64)
    grad, hyper = torch.cat([sizes, -sizes]).float(), RULES["lion"]
    ours, moments, step = torch.ones(grad.shape), [[Moment.zeros(grad.shape, "float32", True, 256)]], [torch.tensor(0.0)]
    wanted, kept = ours.double(), [torch.zeros(grad.shape, dtype=torch.float64)]
    for factor in (1.0, 1.0, -1e-3, -1.0, -1.0):
        run_optim("lion", [ours], [grad * factor], moments, step, hyper, format="float32")
        wanted, kept = reference.lion(wanted, (grad * factor).double(), kept, 0, hyper)
    seen = sizes.repeat(2) > 1e-30  # the signs of sums of less are lost where float32 ends
    torch.testing.assert_close(ours[seen], wanted[seen].float(), rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(moments[0][0].state.double()[seen], kept[0][seen], rtol=1e-5, atol=0)


@pytest.mark.parametrize("format", STATE_FORMATS)
def test_found_inf_skips_the_whole_step(format: str) -> None:
    problem = Problem("adamw", format, 64, (1000, 7), DTYPES)
    before = problem.everything()
    problem.run(found_inf=torch.tensor(1.0), grad_scale=torch.tensor(4.0))
    assert all(torch.equal(a, b) for a, b in zip(problem.everything(), before, strict=True))
    problem.run(found_inf=torch.tensor(0.0))
    assert not any(torch.equal(a, b) for a, b in zip(problem.params, before, strict=False))


def test_gradients_are_divided_by_the_grad_scale() -> None:
    scaled, plain = (Problem("adamw", "dynamic8", 64, (1000, 7), [("float32", "float32")]) for _ in range(2))
    for grad in scaled.grads:
        grad *= 1024
    scaled.run(grad_scale=torch.tensor(1024.0))
    plain.run()
    assert all(torch.equal(a, b) for a, b in zip(scaled.everything(), plain.everything(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(scaled.grads, plain.grads, strict=True))  # as torch's fused optimizers leave them


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_maximize_is_a_step_with_the_negative_gradient(name: str) -> None:
    up, down = (Problem(name, "dynamic8", 64, (1000, 7), DTYPES) for _ in range(2))
    up.hyper = up.hyper | dict(maximize=True)
    for grad in down.grads:
        grad.neg_()
    up.run()
    down.run()
    assert all(torch.equal(a, b) for a, b in zip(up.everything(), down.everything(), strict=True))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradient_that_is_no_number_shows_in_parameter_and_state(row: str, name: str, bad: float) -> None:
    """As with torch the element is lost, and nothing finite is made up: the block of a quantized moment reads back as nan."""
    format = format_of(row)
    problem = Problem(name, format, 64, (300,), [("float32", "float32")])
    problem.grads[0][100] = bad
    problem.run(row)
    coded = format not in ("float32", "bfloat16")
    for each in problem.moments:
        broken = ~each[0].decode().isfinite()
        assert broken[100]
        wanted = torch.zeros(300, dtype=torch.bool)
        wanted[64:128] = coded
        wanted[100] = True
        assert torch.equal(broken, wanted)
        assert not coded or each[0].decode()[64:128].isnan().all()
    if math.isnan(bad) or rule_of(name) != "lion":  # the sign of an infinity is a number, as in torch
        assert not problem.params[0][100].isfinite() or (name == "amsgrad" and math.isinf(bad))
    finite = problem.params[0].isfinite()
    finite[100] = True
    assert finite.all(), "the other elements of this step are computed from what they were"
    problem.grads[0][100] = 1.0
    problem.run(row)
    if coded and problem.moments:
        assert problem.params[0][64:128].isnan().all() and problem.params[0][:64].isfinite().all() and problem.params[0][128:].isfinite().all()


@pytest.mark.parametrize("format", STATE_FORMATS)
@pytest.mark.parametrize("name", [name for name in RULES if rule_of(name) != "muon"])  # whose result is a direction
def test_zero_gradients_from_zero_states_change_nothing(format: str, name: str) -> None:
    problem = Problem(name, format, 64, (1000, 7), DTYPES)
    problem.hyper = problem.hyper | dict(weight_decay=0.0)
    for each in problem.moments:
        for i, moment in enumerate(each):
            each[i] = Moment.zeros((moment.numel,), format, moment.signed, 64)
    for grad in problem.grads:
        grad.zero_()
    before = [param.clone() for param in problem.params]
    problem.run()
    assert all(torch.equal(a, b) for a, b in zip(problem.params, before, strict=True))
    assert all((moment.decode() == 0).all() for each in problem.moments for moment in each)


@pytest.mark.parametrize("format", STATE_FORMATS)
def test_tensors_of_any_dense_order_are_stepped_in_memory_order(format: str) -> None:
    torch.manual_seed(0)
    param, grad = (torch.randn(8, 6, 5, 7).to(memory_format=torch.channels_last) for _ in range(2))
    flat = param.permute(0, 2, 3, 1).flatten().clone(), grad.permute(0, 2, 3, 1).flatten().clone()
    results = []
    for p, g in ((param.clone(), grad), flat):
        moments = [[Moment.zeros(tuple(p.shape), format, signed, 64)] for signed in (True, False)]
        p = p.clone()
        run_optim("adamw", [p], [g], moments, [torch.tensor(0.0)], HYPER, format=format, block_size=64)
        results.append(p if p.dim() == 1 else p.permute(0, 2, 3, 1).flatten())
    assert torch.equal(*results), format


@pytest.mark.parametrize("row", [name for name in AVAILABLE if "dynamic8" in name or "float32" in name])
def test_stochastic_rounding_is_the_references(row: str) -> None:
    """The same bits: Philox per tensor and block, one hash an element. A parameter in float32 says what was rounded."""
    numels = (1, 17, 64, 65, 1000)
    rounded = Problem("adamw", format_of(row), 64, numels, [("bfloat16", "float32")])
    exact = Problem("adamw", format_of(row), 64, numels, [("bfloat16", "float32")])
    exact.params = [param.float() for param in exact.params]
    rounded.run(row, seed=(5 << 32) + 3)
    exact.run(row)
    for index, (ours, values) in enumerate(zip(rounded.params, exact.params, strict=True)):
        bits = reference.random16(len(values), 64, (5 << 32) + 3, int(exact.steps[index]), index)
        assert torch.equal(ours, reference.round_stochastically(values, bits))


def test_stochastic_rounding_keeps_what_nearest_rounding_loses() -> None:
    """1000 steps of 2**-12 from 1, each 1/32 of the spacing of bfloat16 (2**-7): to nearest nothing moves."""
    hyper = HYPER | dict(momentum=0.0, lr=2.0**-12, decoupled=False)
    nearest, random = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(2))
    grad, step = torch.full((4096,), -1.0), torch.tensor(0.0)
    for i in range(1000):
        run_optim("sgd", [nearest], [grad], [], [step], hyper, format="float32")
        run_optim("sgd", [random], [grad], [], [step], hyper, format="float32", seed=i)
    assert (nearest == 1).all()
    moved = random.double() - 1
    # each element is a sum of 1000 draws of 2**-7 with probability 1/32: standard deviation 2**-7 * sqrt(1000 / 32 * 31 / 32)
    deviation = 2.0**-7 * math.sqrt(1000 / 32 * 31 / 32)
    assert abs(moved.mean() - 1000 * 2.0**-12) < 5 * deviation / math.sqrt(4096)
    assert 0.9 * deviation < moved.std() < 1.1 * deviation


def test_stochastic_rounding_of_values_that_are_no_numbers() -> None:
    param = torch.tensor([math.inf, -math.inf, math.nan, 3.0, 0.0, -0.0], dtype=torch.bfloat16)
    before = param.clone()
    hyper = HYPER | dict(momentum=0.0, lr=0.0, decoupled=False)
    run_optim("sgd", [param], [torch.zeros(6)], [], [torch.tensor(0.0)], hyper, format="float32", seed=1)
    assert torch.equal(param.nan_to_num(7.0, 9.0, -9.0), before.nan_to_num(7.0, 9.0, -9.0))


def test_nothing_to_do_is_fine() -> None:
    run_optim("adamw", [], [], [[], []], [], HYPER, format="dynamic8")
    empty = [Moment("dynamic8", signed, 64, 0, torch.empty(0, dtype=torch.uint8), torch.empty(0)) for signed in (True, False)]
    step = torch.tensor(0.0)
    run_optim("adamw", [torch.empty(0)], [torch.empty(0)], [[empty[0]], [empty[1]]], [step], HYPER, format="dynamic8", block_size=64)
    assert step == 1


def bad_calls() -> list[tuple[str, type[Exception], str]]:
    return [
        ("params[1] = params[1].double()", TypeError, r"params\[1\] must be float32, bfloat16 or float16, got float64"),
        ("grads[1] = grads[1].double()", TypeError, r"grads\[1\] must be float32, bfloat16 or float16, got float64"),
        ("grads[1] = torch.zeros(99)", ValueError, r"grads\[1\] must have .*\[100\], got \[99\]"),
        ("params[1] = torch.zeros(100, 2)[:, 0]", ValueError, r"params\[1\] must be dense"),
        ("grads[1] = torch.zeros(100, 2)[:, 0]", ValueError, r"grads\[1\] must have"),
        *((f"{given}.pop()", ValueError, f"{given.partition('[')[0]} must have 2 entries, got 1")
          for given in ("grads", "steps", "states", "states[1]", "scales[0]")),
        ("states[0][1] = torch.zeros(100)", TypeError, r"states\[0\]\[1\] must be uint8, got float32"),
        ("states[0][1] = torch.zeros(50, dtype=torch.uint8)", ValueError, r"states\[0\]\[1\] must have 100 elements, got \[50\]"),
        ("scales[1][1] = torch.zeros(1)", ValueError, r"states\[1\]\[1\] scale must have 2 elements, got \[1\]"),
        ("scales[1][1] = torch.zeros(2).half()", TypeError, r"states\[1\]\[1\] scale must be float32, got float16"),
        ("steps[1] = torch.tensor(1)", TypeError, r"steps\[1\] must be one float32, got int64"),
        ("steps[1] = torch.zeros(2)", TypeError, r"steps\[1\] must be one float32"),
        ("grads[0] = torch.zeros(100).to_sparse()", TypeError, r"grads.* must be a dense CPU tensor"),
        ("params[0] = torch.zeros(100, device='meta')", (TypeError, ValueError), r"params"),
        ("rest['block_size'] = 100", ValueError, r"block_size must be a power of two .*, got 100"),
        ("rest['rule'] = 17", ValueError, r"rule must be 0\.\.\d, got rule=17"),
        ("rest['state_format'] = -1", ValueError, r"state_format must be 0\.\.4, got state_format=-1"),
        ("rest['grad_scale'] = torch.zeros(2)", TypeError, r"grad_scale must be one float32"),
        ("rest['found_inf'] = torch.tensor(0)", TypeError, r"found_inf must be one float32, got int64"),
        ("rest['hyper']['learning_rate'] = 0.1", (TypeError, ValueError), r"hyper.*learning_rate"),
    ]  # fmt: skip


@pytest.mark.parametrize("change, error, text", bad_calls(), ids=[call[0] for call in bad_calls()])
def test_bad_arguments_say_what_was_wanted_and_change_nothing(change: str, error: type[Exception], text: str) -> None:
    params, grads = [torch.randn(100) for _ in range(2)], [torch.randn(100) for _ in range(2)]
    states = [[torch.zeros(100, dtype=torch.uint8) for _ in range(2)] for _ in range(2)]
    scales, steps = [[torch.zeros(2) for _ in range(2)] for _ in range(2)], [torch.tensor(0.0) for _ in range(2)]
    rest = dict(rule=_C.OPTIM_RULES["adamw"]["number"], state_format=_C.STATE_FORMATS["dynamic8"], block_size=64, hyper=dict(HYPER),
                grad_scale=None, found_inf=None, seed=None)  # fmt: skip
    kept = [params[0], params[0].clone(), steps[0]]
    exec(change)
    with pytest.raises(error, match=rf"optim_step: {text}"):
        _C.OptimStep(params=params, grads=grads, states=states, scales=scales, steps=steps, **rest).run()
    assert torch.equal(kept[0], kept[1]) and kept[2] == 0
