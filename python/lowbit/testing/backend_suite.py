# SPDX-License-Identifier: Apache-2.0
"""The test kit for packages that add kernel rows: it compares every row with float64, using lowbit's own error
budgets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit import _C
from lowbit.backends.report import report
from lowbit.ops.attention import attention
from lowbit.reference.attention import attention as reference_attention
from lowbit.testing.cases import (
    DTYPES,
    STATE_FORMATS,
    LinearCase,
    assert_within,
    cached_data,
    format_cases,
    linear_cases,
    run_linear,
    serves,
)
from lowbit.testing.optim_problem import RULES, Problem

TESTED = ("linear", "attention_forward", "attention_backward", "optim_step")
"""The ops for which the kit has cases."""
ATTENTION_BUDGETS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""The max error of an attention result, relative to its largest value."""


def backend_suite(device: str = "cpu", by: str | None = None) -> type:
    """Return a class of pytest tests for the kernel rows of a device: linear in every format and shape that a row
    supports, attention and its gradients, and optimizer steps.

    Only the name is tested for rows of other ops (``lowbit.backends.OPS``). A row that supports no case fails.

    Args:
        device: the type of device, as in `lowbit.kernels`.
        by: a package, to test only the rows that it added.

    Returns:
        The class, to be assigned to a name that pytest collects.

    Raises:
        ValueError: there are no such rows; the message has the report, which says why.

    Example:
        >>> from lowbit.testing import backend_suite
        >>> TestRows = backend_suite("cpu", by="acme-kernels")
    """
    rows = [row for row in _rows(device) if by is None or row["backend"] == by]
    if not rows:
        whose = f" of {by}" if by else ""
        raise ValueError(f"backend_suite: device must have kernel rows{whose}, got {device}\n{report()}")

    class Suite:
        def pytest_generate_tests(self, metafunc: Any) -> None:
            op = {"test_linear": "linear", "test_optim_step": "optim_step"}.get(metafunc.function.__name__)
            ops = ("attention_forward", "attention_backward") if "attention" in metafunc.function.__name__ else (op,)
            mine = [str(row["name"]) for row in rows if ops == (None,) or row["op"] in ops]
            metafunc.parametrize("row", mine)

        def test_names_and_availability(self, row: str) -> None:
            facts = next(each for each in rows if each["name"] == row)
            assert re.fullmatch(rf"{facts['op']}(_[a-z0-9]+)+", row), row
            assert facts["available"], facts["reason"]

        def test_linear(self, row: str) -> None:
            check_linear(row, device)

        def test_attention(self, row: str) -> None:
            check_attention(row, device)

        def test_optim_step(self, row: str) -> None:
            check_optim_step(row, device)

    return Suite


def _rows(device: str) -> Iterator[dict[str, Any]]:
    for op in _C.OPS:
        yield from ({"op": op, **row} for row in _C.kernels(op) if row["device"] == device)


@functools.cache
def _linear_cases() -> list[LinearCase]:
    """Return the cases of lowbit's own tests, and for each format and dtype some without post-ops."""
    plain = itertools.product(((1, 16, 64), (5, 37, 100), (33, 64, 256)), DTYPES, format_cases())
    return linear_cases(rounds=1) + [LinearCase(*sizes, dtype, *format) for sizes, dtype, format in plain]


def check_linear(row: str, device: str) -> None:
    """Fail unless a row of ``linear`` is within the error budget in every case that it supports."""
    reached = False
    for case in _linear_cases():
        if not serves(row, case, device):
            continue
        data = cached_data(case)
        fields = {name: getattr(data, name) for name in ("x", "packed", "bias", "mul", "add")}
        there = {name: value.to(_place(device)) for name, value in fields.items() if value is not None}
        try:
            y = run_linear(case, dataclasses.replace(data, **there), row)
        except NotImplementedError:
            continue  # the post-ops matter too
        assert_within(y.cpu(), data.wanted, data.allowed, f"{row} {case}")
        reached = True
    assert reached, f"no case reaches the row {row}"


def check_attention(row: str, device: str) -> None:
    """Fail unless a row of ``attention_forward`` or ``attention_backward`` is within the error budget."""
    op = "attention_backward" if row.startswith("attention_backward") else "attention_forward"
    cases = itertools.product(ATTENTION_BUDGETS, _ATTENTION_CASES)
    reached = [_attention_case(op, row, device, dtype, **case) for dtype, case in cases]
    assert any(reached), f"no case reaches the row {row}"


_ATTENTION_CASES: tuple[dict[str, Any], ...] = (
    {},
    {"kv_heads": 2},
    {"causal": True},
    {"kv_heads": 1, "causal": True, "length": 80},
    {"masked": True},
    {"sink": True},
    {"length": 300, "kv_length": 300, "causal": True},
)


def _attention_case(
    op: str,
    row: str,
    device: str,
    dtype: torch.dtype,
    *,
    kv_heads: int = 4,
    length: int = 48,
    kv_length: int = 80,
    causal: bool = False,
    masked: bool = False,
    sink: bool = False,
) -> bool:
    """Run a case with the row and compare it with float64. Return False if the row does not support it."""
    random = torch.Generator().manual_seed(length + kv_heads)
    shapes = (2, 4, length, 16), (2, kv_heads, kv_length, 16), (2, kv_heads, kv_length, 24)
    here = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    keep = torch.rand(2, 4, length, kv_length, generator=random) < 0.7 if masked else None
    logits = torch.randn(4, generator=random) if sink else None
    wants_gradient = op == "attention_backward"
    there = [tensor.to(_place(device)).requires_grad_(wants_gradient) for tensor in here]
    options = {"mask": keep, "sink": logits}
    options = {name: None if value is None else value.to(_place(device)) for name, value in options.items()}
    previous = _C.force_kernel(row)
    try:
        out, lse, _ = attention(*there, scale=0.25, causal=causal, **options)
        gradient = torch.randn(out.shape, generator=random).to(dtype)
        results = [out.detach(), lse.detach()]
        if wants_gradient:
            results += torch.autograd.grad(out, there, gradient.to(_place(device)))
    except NotImplementedError:
        return False
    finally:
        _C.force_kernel(previous)
    assert _C.last_kernel(op) == row, f"asked for {row}, but {_C.last_kernel(op)} ran"
    wide = [tensor.double().requires_grad_() for tensor in here]
    mask_mod = _mask_mod(causal, keep)
    wanted = list(reference_attention(*wide, mask_mod=mask_mod, scale=0.25, sink=logits)[:2])
    if wants_gradient:
        wanted += torch.autograd.grad(wanted[0], wide, gradient.double())
    for name, actual, exact in zip(("out", "lse", "grad_q", "grad_k", "grad_v"), results, wanted, strict=False):
        seen = exact.isfinite()
        off = (actual.cpu().double() - exact)[seen].abs().max()
        largest = max(1.0, exact[seen].abs().max().item())
        assert torch.equal(actual.cpu().isfinite(), seen) and off <= ATTENTION_BUDGETS[dtype] * largest, (
            f"{row}: {name} of {dtype} is off by {off:.3g}, allowed is {ATTENTION_BUDGETS[dtype] * largest:.3g}"
        )
    return True


def _mask_mod(causal: bool, keep: Tensor | None) -> Any:
    if causal:
        return lambda b, h, q, k: k <= q
    return None if keep is None else (lambda b, h, q, k: keep[b.long(), h.long(), q.long(), k.long()])


def check_optim_step(row: str, device: str) -> None:
    """Fail unless a row of ``optim_step`` is within the error budget for every rule and state format that it
    supports."""
    reached = False
    for name, format in itertools.product(RULES, STATE_FORMATS):
        problem = Problem(name, format, 256, (1, 17, 64, 1000), [("float32", "float32"), ("bfloat16", "bfloat16")])
        wanted = problem.wanted()
        problem.to(_place(device))
        try:
            problem.run(row)
        except NotImplementedError:
            continue
        problem.to("cpu")
        problem.check_against(wanted, f"{row} {name} {format}")
        reached = True
    assert reached, f"no case reaches the row {row}"


def _place(device: str) -> str:
    return device if device == "cpu" else f"{device}:0"
