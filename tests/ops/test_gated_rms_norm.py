# SPDX-License-Identifier: Apache-2.0
"""gated_rms_norm: every row against float64, beside the modules of transformers; what it refuses with and without
data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused_alike
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from torch import Tensor

import lowbit
from lowbit import testing

op = torch.ops.lowbit.gated_rms_norm
norm_row = fixture_of(testing.rows("gated_rms_norm"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
ACTIVATION = 8
"""Roundings of silu and of sigmoid, relative to their values."""


def wanted_and_allowed(x: Tensor, gate: Tensor, weight: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """In float64; and the error of a float32 sum of squares, in any order, under a root (which halves it), of root,
    division, mean, eps and three products, of the gate, which stands in the norm too if it comes first, and of rounding
    the result."""
    function = torch.sigmoid if options["activation"] == "sigmoid" else torch.nn.functional.silu
    gated, size, first = function(gate.double()), options["group_size"] or x.shape[-1], options["gate_first"]
    values = (x.double() * gated if first else x.double()).unflatten(-1, (-1, size))
    normalized = (values * (values.square().mean(-1, keepdim=True) + EPS).rsqrt()).flatten(-2)
    wanted = normalized * weight.double() * (1 if first else gated)
    roundings = (size + 8) / 2 + 7 + ACTIVATION * (2 if first else 1)
    error = roundings * testing.ROUNDOFF["float32"] * wanted.abs()
    roundoff = testing.ROUNDOFF[str(x.dtype).removeprefix("torch.")]
    return wanted, error + roundoff * (wanted.abs() + error + torch.finfo(x.dtype).smallest_normal) + 1e-30


@pytest.mark.core
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_every_row_is_within_the_roundings_of_its_sum(
    norm_row: str, gate_first: bool, activation: str, subtests: pytest.Subtests
) -> None:
    """The last is large enough for several threads."""
    torch.manual_seed(0)
    sizes = [(1, 1, None), (3, 15, 5), (1, 16, None), (2, 34, 17), (5, 257, None), (70, 1024, 256), (900, 384, 128)]
    for number, (m, n, group_size) in enumerate(sizes):
        x = (torch.randn(m, n) * torch.logspace(-3, 1, m)[:, None]).to(DTYPES[number % 3])
        x[0] = 0
        for turn in range(3):
            gate, weight = torch.randn(m, n).to(DTYPES[turn]), torch.randn(n).to(DTYPES[(number + turn) % 3])
            options = {"group_size": group_size, "activation": activation, "gate_first": gate_first}
            with subtests.test(m=m, n=n, turn=turn):
                with forced(norm_row):
                    y = lowbit.gated_rms_norm(x, gate, weight, EPS, **options)
                assert y.dtype == x.dtype and y.is_contiguous()
                testing.assert_within(y, *wanted_and_allowed(x, gate, weight, options), what=norm_row)


def test_large_gates_and_inputs(norm_row: str) -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    gate = torch.tensor([-80.0, -20.0, 60.0, 1e4])[:, None].expand(4, 32)
    for gate_first in (False, True):
        for scale in (1e-20, 1.0, 1e12):
            options = {"group_size": 16, "activation": "silu", "gate_first": gate_first}
            with forced(norm_row):
                y = lowbit.gated_rms_norm(x * scale, gate, weight, EPS, **options)
            testing.assert_within(y, *wanted_and_allowed(x * scale, gate, weight, options), what=norm_row)


@pytest.mark.parametrize("gate_first", [False, True])
def test_any_strides_any_rank_and_no_elements(gate_first: bool) -> None:
    projected, weight = torch.randn(2, 5, 3 * 48), torch.randn(32)[::2]
    x, gate = projected[..., 48:96].unflatten(-1, (3, 16)), projected[..., :48].unflatten(-1, (3, 16)).transpose(0, 1)
    for one, other in ((x, gate.transpose(0, 1)), (x.mT.contiguous().mT, x.flip(0)), (x[0, 0, 0], x[1, 1, 1])):
        dense = lowbit.gated_rms_norm(one.contiguous(), other.contiguous(), weight.contiguous(), gate_first=gate_first)
        assert dense.equal(lowbit.gated_rms_norm(one, other, weight, gate_first=gate_first))
    assert lowbit.gated_rms_norm(x[:0], x[:0], weight, gate_first=gate_first).shape == (0, 5, 3, 16)


def test_the_bits_do_not_depend_on_threads() -> None:
    x, gate, weight = torch.randn(700, 4, 128), torch.randn(700, 4, 128), torch.randn(128)
    for gate_first in (False, True):
        same_for_any_threads(
            lambda gate_first=gate_first: lowbit.gated_rms_norm(x, gate, weight, group_size=64, gate_first=gate_first)
        )


@pytest.mark.parametrize("gate_first", [False, True])
def test_what_is_not_finite_stays_in_its_group(gate_first: bool) -> None:
    x, gate = torch.randn(2, 80), torch.randn(2, 80)
    x[0, 3], gate[1, 50] = torch.nan, torch.nan
    y = lowbit.gated_rms_norm(x, gate, torch.ones(80), group_size=40, gate_first=gate_first)
    assert y[0, :40].isnan().all() and y[1, 50].isnan() and y[0, 40:].isfinite().all() and y[1, :40].isfinite().all()
    assert y[1, 40:].isnan().all() == gate_first


@pytest.mark.parametrize("model, options", [
    ("qwen3_next.Qwen3NextRMSNormGated", {}),
    ("olmo_hybrid.OlmoHybridRMSNormGated", {}),
    ("kimi_linear.KimiLinearRMSNormGated", {"activation": "sigmoid"}),
    ("mamba2.MambaRMSNormGated", {"group_size": 16, "gate_first": True}),
    ("nemotron_h.NemotronHRMSNormGated", {"group_size": 16, "gate_first": True}),
])  # fmt: skip
def test_the_modules_of_transformers_agree(model: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    folder, name = model.split(".")
    theirs = getattr(__import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[name]), name)
    norm = theirs(64, **{key: value for key, value in options.items() if key == "group_size"}, eps=1e-5)
    x, gate = torch.randn(7, 64), torch.randn(7, 64)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(64))
        ours = lowbit.gated_rms_norm(x, gate, norm.weight, norm.variance_epsilon, **options)
        torch.testing.assert_close(ours, norm(x, gate), rtol=1e-5, atol=1e-6)


ONES = torch.ones(2, 4)
GOOD = {"x": ONES, "gate": ONES, "weight": ONES[0], "eps": EPS, "group_size": 4}


@pytest.mark.parametrize("change, error, text", [
    ({"x": ONES.double()}, TypeError, "x must be float32, bfloat16 or float16, got float64"),
    ({"x": torch.ones(())}, ValueError, r"x must have shape \[\.\.\., n\], n at least 1, got \[\]"),
    ({"x": torch.ones(3, 0)}, ValueError, r"x must have shape \[\.\.\., n\], n at least 1, got \[3, 0\]"),
    ({"gate": ONES[:1]}, ValueError, r"gate must have shape \[2, 4\], got \[1, 4\]"),
    ({"gate": ONES.int()}, TypeError, "gate must be float32, bfloat16 or float16, got int32"),
    ({"weight": ONES}, ValueError, r"weight must have shape \[4\], got \[2, 4\]"),
    ({"weight": ONES[0].double()}, TypeError, "weight must be float32, bfloat16 or float16, got float64"),
    ({"group_size": 3}, ValueError, "group_size must divide the 4 channels of x, got 3"),
    ({"group_size": 0}, ValueError, "group_size must divide the 4 channels of x, got 0"),
    ({"eps": -1.0}, ValueError, "eps must be finite and not negative, got -1"),
    ({"eps": float("nan")}, ValueError, "eps must be finite and not negative, got nan"),
])  # fmt: skip
def test_bad_input_is_refused_with_and_without_data(change: dict[str, Any], error: type[Exception], text: str) -> None:
    refused_alike(op, GOOD | change, error, f"gated_rms_norm: {text}")


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="gated_rms_norm: activation must be 'silu' or 'sigmoid', got None"):
        lowbit.gated_rms_norm(ONES, ONES, ONES[0], activation=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, gate_first: bool) -> None:
    x = torch.randn(3, 20, 5).mT.to(dtype)
    torch.library.opcheck(op.default, (x, x * 2, torch.randn(20), EPS, 10, False, gate_first))
