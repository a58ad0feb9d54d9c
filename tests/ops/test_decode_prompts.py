# SPDX-License-Identifier: Apache-2.0
"""decode of many queries over codes (prompts): every row against float64, and which calls are taken so."""

from __future__ import annotations

import itertools

import pytest
import torch
from row_fixture import fixture_of
from settings import forced, same_for_any_threads
from test_decode import OPTIONS, Case, Data, U, kind_of, make, run
from tests import internals
from torch import Tensor

from lowbit import _C, testing
from lowbit.reference import decode as reference
from lowbit.score.program import ProgramBuilder

FORMATS = ("int8", "int4")
SHAPES = [  # B, Hq, Hkv, L, S, E, Ev: around tiles of 32 queries and of 128 and 256 keys, groups, odd head dimensions
    (1, 4, 2, 70, 300, 64, 64),
    (2, 2, 2, 130, 131, 40, 59),
    (1, 8, 2, 17, 65, 128, 100),
    (1, 1, 1, 290, 1000, 96, 31),
    (1, 3, 1, 33, 515, 80, 64),
    (2, 2, 1, 100, 40, 16, 17),  # causal: the first 60 queries stand before every key
    (1, 2, 2, 600, 600, 32, 32),  # a window ends in the middle of a tile of queries
]
ROWS = [row for row in testing.rows("decode") if kind_of(str(row["name"])) == "prompt"]
row = fixture_of(ROWS)


def dtype_of(row: str) -> str:
    """The only dtype of q that a row of tiles takes; one of those of a row of float32."""
    return row.split("_")[2] if testing.multiplies_parts(row) else "bfloat16"


def cases(row: str) -> list[Case]:
    """Each shape in both formats with three of the options, in both layouts and all dtypes of q that the row takes."""
    dtypes = [dtype_of(row)] if testing.multiplies_parts(row) else testing.DTYPES
    made = []
    for index, (shape, format, part) in enumerate(itertools.product(SHAPES, FORMATS, range(3))):
        option = OPTIONS[(index // 3 + 2 * part) % len(OPTIONS)]
        made.append(Case(shape, option, format, dtypes[index % len(dtypes)], index % 2 == 1))
    return made


def budget(case: Case, data: Data, row: str) -> tuple[Tensor, Tensor]:
    """That of float keys and values (test_decode.budget), more of int4 that are rotated back; tiles of
    bfloat16 round keys, values and probabilities to one part of 8 bits, or two."""
    k, v = (reference.decoded(data.call[name], data.call[f"{name}_scale"]) for name in ("k", "v"))
    k, v = (reference.rotate(k) if data.call["rotated"] else k)[..., : case.shape[5]], v[..., : case.shape[6]]
    exact = {name: data.call[name] for name in ("causal", "position", "window", "mask", "sink") if name in data.call}
    p = reference.decode(data.q, k, v, data.call["scale"], **exact)[2]
    k, v = (x.abs().repeat_interleave(case.shape[1] // case.shape[2], 1) for x in (k, v))
    magnitude = (data.q.double().abs() @ k.transpose(-1, -2)).amax(-1, keepdim=True) * data.call["scale"]
    score = (case.shape[5] + 60) * U * magnitude + 8 * U * data.lse.abs().clamp(max=1e3).nan_to_num()[..., None]
    if case.option == "float mask":
        score = score + 8 * U * data.call["mask"].double().abs().amax(-1, keepdim=True)
    sums = (case.shape[4] + 20) * U
    if testing.multiplies_parts(row):
        part = 2.0**-9 if "_bfloat16_" in row else 2.0**-16  # of each key, value and probability
        score, sums = score + 2 * part * magnitude, sums + 2 * part
    allowed = (2 * score + sums) * (p @ v)
    rounding = testing.ROUNDOFF[case.q_dtype]
    return allowed + rounding * (data.out.abs() + allowed) + 1e-30, score[..., 0] + sums + U * data.lse.abs().nan_to_num()


@pytest.mark.core
def test_every_row_is_within_budget_of_float64(row: str, subtests: pytest.Subtests) -> None:
    for case in cases(row):
        with subtests.test(str(case)):
            data = make(case)
            out, lse = run(data, row)
            allowed, allowed_lse = budget(case, data, row)
            testing.assert_within(out, data.out, allowed, f"{case} by {row}")
            testing.assert_within(lse, data.lse, allowed_lse, f"lse of {case} by {row}")


def test_results_do_not_depend_on_threads_or_batch(row: str) -> None:
    data = make(Case((3, 8, 2, 70, 500, 64, 64), "causal", "int8", dtype_of(row)))
    together, _ = same_for_any_threads(lambda: run(data, row))
    alone = {name: value[1:2] if isinstance(value, Tensor) else value for name, value in data.call.items()}
    out, _ = run(Data(alone, data.q[1:2], data.out, data.lse, data.allowed, data.allowed_lse), row)
    assert torch.equal(out, together[1:2])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("length,group,row", [(16, 8, "int"), (17, 2, "int"), (32, 2, "int"), (33, 2, "prompt"), (17, 4, "prompt"), (65, 1, "prompt")])
def test_many_rows_of_more_than_16_queries_are_a_prompt(format: str, length: int, group: int, row: str) -> None:
    data = make(Case((1, group, 1, length, 100, 64, 64), "causal", format))
    run(data)
    assert kind_of(str(_C.last_kernel("decode"))).startswith(row)
    codes, prompt = (f"decode_{kind}_scalar" for kind in (format, "prompt_float32"))
    with pytest.raises(NotImplementedError, match="no kernel row fits"):
        run(data, prompt if row == "int" else codes)


@pytest.mark.parametrize("format", FORMATS)
def test_a_program_is_run_over_codes_as_they_are(format: str) -> None:
    mask = ProgramBuilder()
    mask_mod = mask.finish(mask.op("le", mask.op("k"), mask.op("q")))
    data = make(Case((1, 4, 2, 70, 300, 64, 64), "causal", format))
    out = torch.empty(data.out.shape)
    call = {name: value for name, value in data.call.items() if name != "causal"}
    internals.decode(data.q, call.pop("k"), call.pop("v"), out, call.pop("scale"), mask_mod=mask_mod, **call)
    assert str(_C.last_kernel("decode")).startswith(f"decode_{format}_")
    testing.assert_within(out, data.out, data.allowed, "a mask by a program")


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_that_no_query_sees_are_not_read(row: str, format: str) -> None:
    data = make(Case((1, 4, 2, 70, 900, 64, 64), "window", format, dtype_of(row)))
    data.call |= {"window": 40, "position": 500}  # tokens 461 to 569
    wanted = run(data, row)
    for name in ("k_scale", "v_scale"):
        data.call[name] = data.call[name].clone()
        data.call[name][:, :, :461] = data.call[name][:, :, 570:] = torch.nan
    for got, before in zip(run(data, row), wanted, strict=True):
        assert torch.equal(got, before)


def test_a_prompt_over_no_tokens_gives_zeros(row: str) -> None:
    q, out, lse = torch.randn(1, 2, 70, 64), torch.ones(1, 2, 70, 32), torch.ones(1, 2, 70)
    if testing.multiplies_parts(row):
        pytest.skip(f"{row}: wants 32 keys")
    k, v, scale = (torch.empty(1, 2, 0, n, dtype=t) for n, t in ((64, torch.int8), (32, torch.int8), (1, torch.float32)))
    with forced(row):
        internals.decode(q, k, v, out, 1.0, scale, scale, lse=lse)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("name", ("k_scale", "v_scale"))
@pytest.mark.parametrize("format", FORMATS)
def test_a_prompt_hides_no_nan(row: str, format: str, name: str) -> None:
    data = make(Case((1, 2, 1, 70, 200, 64, 64), "plain", format, dtype_of(row)))
    data.call[name] = data.call[name].clone()
    data.call[name][0, 0, 7] = torch.nan
    assert run(data, row)[0].isnan().all()
