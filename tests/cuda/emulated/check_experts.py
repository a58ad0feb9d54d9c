# SPDX-License-Identifier: Apache-2.0
"""experts on the emulated GPU: within the budget of the CPU's rows; one launch a product, for all experts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from expert_calls import FORMS, OUT, ROUTES, Case, E, Form, Of, case, expected, routed
from settings import forced
from torch import Tensor

import lowbit
from lowbit import testing
from lowbit.devices import simulated
from lowbit.testing import LinearCase, assert_within

simulated.enable()
DEVICE = "lowbit_sim:1"
CASES: list[tuple[Of, Form, str]] = [
    (("int4", 32, "symmetric", "int8_group"), FORMS[0], "float32"),
    (("int4", 32, "asymmetric", "float"), FORMS[3], "bfloat16"),
    (("int8", 0, "symmetric", "int8_row"), FORMS[5], "bfloat16"),
    (("int8", 0, "asymmetric", "int8_row_asymmetric"), FORMS[1], "float16"),
    (("nf4", 64, "symmetric", "float"), FORMS[2], "float16"),
    (("fp8_e4m3", 0, "symmetric", "float8_row"), FORMS[4], "bfloat16"),
    (("bfloat16", 0, "symmetric", "float"), FORMS[6], "bfloat16"),
    (("int3", 0, "symmetric", "float"), FORMS[7], "float32"),
]


def on_device(of: Of, gated: bool, device: str) -> Case:
    here = case(of, gated)
    return here._replace(**{name: getattr(here, name).to(device) for name in ("gate_up", "down", "gate_up_bias", "down_bias")})


def on_gpu(of: Of, form: Form, x: Tensor, index: Tensor, weights: Tensor, device: str = DEVICE) -> Tensor:
    with forced(f"experts_{'int8_' if of[3].startswith('int8') else ''}cuda_sim"):
        return on_device(of, form.gated, device).run(x.to(device), index.to(device), weights.to(device), form).cpu()


@pytest.mark.parametrize("of, form, dtype", CASES, ids=str)
def test_every_token_is_within_budget_of_the_float64_reference(of: Of, form: Form, dtype: str) -> None:
    for number, route in enumerate(ROUTES):
        x, index, weights = routed(route, dtype)
        given = index.to((torch.int32, torch.int64)[number % 2]), weights.to((x.dtype, torch.float32)[number % 2])
        y = on_gpu(of, form, x, *given)
        assert_within(y, *expected(of, form, route, dtype, given[1].dtype), f"{of} {form} {route}")


def test_pairs_of_no_expert_count_nothing() -> None:
    of, form = CASES[0][:2]
    x, index, weights = (tensor[:8] for tensor in routed("many tokens", "float32"))
    nobody = torch.arange(16).view(8, 2) % 3 == 0
    marked = on_gpu(of, form, x, index.masked_fill(nobody, E), weights.masked_fill(nobody, torch.nan))
    assert marked.equal(on_gpu(of, form, x, index, weights.masked_fill(nobody, 0.0)))
    assert on_gpu(of, form, x, torch.full_like(index, E), weights).eq(0).all()
    assert on_gpu(of, form, x, index[:, :0], weights[:, :0]).eq(0).all()
    assert on_gpu(of, form, x[:0], index[:0], weights[:0]).shape == (0, OUT)


@pytest.mark.parametrize("outside", [-1, E + 1])
def test_an_expert_that_is_not_there_ends_the_launch(outside: int) -> None:
    x, index, weights = routed("one token", "float32")
    with pytest.raises(RuntimeError, match="sort_pairs of pairs of experts.*LAUNCH_FAILED"):
        on_gpu(*CASES[0][:2], x, index.masked_fill(index == 3, outside), weights)


@pytest.mark.parametrize("of", [CASES[0][0], ("int4", 32, "asymmetric", "float")], ids=str)
def test_tokens_that_are_not_finite_are_alone(of: Of) -> None:
    x, index, weights = (tensor[:12].clone() for tensor in routed("many tokens", "bfloat16"))
    clean = on_gpu(of, Form(), x, index, weights)
    x[3, 5], x[4, 0], weights[7, 1], weights[8, 0] = torch.inf, torch.nan, torch.nan, torch.inf
    y, odd = on_gpu(of, Form(), x, index, weights), [3, 4, 7, 8]
    assert not y[odd].isfinite().any()
    rest = [token for token in range(12) if token not in odd]
    assert y[rest].equal(clean[rest])


def test_a_product_is_one_launch_and_no_memory_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, form, dtype = CASES[0]
    given = routed("many tokens", dtype)
    on_gpu(of, form, *given)
    log, before = tmp_path / "log", simulated.live_bytes(DEVICE)
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(log))
    on_gpu(of, form, *given)
    launches = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert launches == ["sort_pairs", "gather_rows", "activations", "product_of_experts", "gate_experts", "activations", "product_of_experts", "add_experts"]
    assert simulated.live_bytes(DEVICE) == before


def test_k_is_split_where_ctas_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of 132 multiprocessors. Sums of codes are the same in any order."""
    torch.manual_seed(0)
    shapes = (32, 2100), (16, 16)
    packed = [torch.stack([testing.pack_weight(torch.randn(n, k), "int8") for _ in range(2)]) for n, k in shapes]
    numbers = [[int(a) for a in LinearCase(1, n, k, "float32", "int8", 0, "symmetric", "int8_row", None).op_args] for n, k in shapes]
    x, index, weights, results = torch.randn(2, 2100), torch.tensor([[0], [1]]), torch.rand(2, 1), []
    monkeypatch.setenv("LOWBIT_EMULATED_LOG", str(tmp_path / "log"))
    for device in (DEVICE, "lowbit_sim:0"):
        with forced("experts_int8_cuda_sim"):
            tensors = (tensor.to(device) for tensor in (x, *packed, index, weights))
            results.append(torch.ops.lowbit.experts(*tensors, *numbers, *Form().numbers).cpu())
    launches = [line.split()[1:3] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("launch product")]
    assert [ctas for _, ctas in launches] == ["2", "2", "4", "2"]
    assert torch.equal(*results) and results[0].any()


@pytest.mark.parametrize(
    "row, of, words",
    [("experts_int8", ("int8", 0, "symmetric", "float"), "float activations"), ("experts", ("int8", 0, "symmetric", "int8_row"), "int8 activations"),
     ("experts_int8", ("int8_semi_sparse", 0, "symmetric", "int8_row"), "a 2:4 weight")],
    ids=str,
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(row: str, of: Of, words: str) -> None:
    with lowbit.force_kernel(f"{row}_cuda_sim"), pytest.raises(NotImplementedError, match=words):
        on_device(of, True, DEVICE).run(*(tensor.to(DEVICE) for tensor in routed("one token", "float32")), Form())


BARRIERS = {"pairs": [(CASES[0], "many tokens", 4)], "product": [(CASES[4], "one token", 24)]}
"""By file: the table of levels is missed only where its warp sleeps at first."""


def test_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by test_emulated.py once as it is, and for each barrier without it, what its file is for."""
    for (of, form, dtype), route, seeds in BARRIERS.get(os.environ.get("LOWBIT_BARRIERS_OF"), sum(BARRIERS.values(), [])):
        for seed in range(seeds):
            monkeypatch.setenv("LOWBIT_EMULATED_SEED", str(seed))
            assert_within(on_gpu(of, form, *routed(route, dtype)), *expected(of, form, route, dtype), route)
