# SPDX-License-Identifier: Apache-2.0
"""State formats of the optimizers: maps as bitsandbytes' and torchao's, encoding is the nearest value, on every row, but
that a moment without sign is above 0 where its value is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from settings import forced
from torch import Tensor

from lowbit import _C, testing
from lowbit.reference import optim as reference

CODED = ("dynamic8", "dynamic4", "float8")
MAPS = list(itertools.product(CODED, (True, False)))
DECODING = 6  # roundings of float32 between a decoded value and the map times the scale
BITS = {"dynamic8": 8, "dynamic4": 4, "float8": 8}
NUMELS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 1000, 4096, 5003)
ROWS = [row for row in testing.rows("encode_state") if row["available"]]
ISAS = list(dict.fromkeys(row["backend"] for row in ROWS))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """An instruction set of this machine; `encode` and `decode` force its row of their format."""
    return str(request.param)


def run(isa: str, format: str, call: Callable[..., None], *arguments: object) -> None:
    with forced(f"{call.__name__}_{format}_{isa}"):
        call(*arguments)


def encode(isa: str, values: Tensor, format: str, signed: bool, block_size: int) -> tuple[Tensor, Tensor]:
    """Codes, one an element, and scales."""
    numel = values.numel()
    codes = torch.full((-(-numel // 2) if format == "dynamic4" else numel,), 0xAA, dtype=torch.uint8)
    scale = torch.full((-(-numel // block_size),), -1.0)
    run(isa, format, _C.encode_state, values, _C.STATE_FORMATS[format], signed, block_size, codes, scale)
    return reference.unpack_nibbles(codes, numel) if format == "dynamic4" else codes, scale


def decode(isa: str, codes: Tensor, scale: Tensor, format: str, signed: bool, block_size: int) -> Tensor:
    numel = codes.numel()
    if format == "dynamic4":
        pairs = torch.nn.functional.pad(codes, (0, numel % 2)).view(-1, 2)
        codes = pairs[:, 0] << 4 | pairs[:, 1]
    values = torch.full((numel,), 7.0)
    run(isa, format, _C.decode_state, codes, scale, _C.STATE_FORMATS[format], signed, block_size, values)
    return values


def all_codes(format: str) -> Tensor:
    return torch.arange(2 ** BITS[format], dtype=torch.uint8)


@pytest.mark.parametrize("signed", [True, False])
def test_reference_maps_are_those_of_bitsandbytes_and_torchao(signed: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    torchao = pytest.importorskip("torchao.optim.quant_utils")
    ours = reference.code_map("dynamic8", signed)
    for theirs in (bitsandbytes.create_dynamic_map(signed), torch.tensor(torchao.create_dynamic_map(signed))):
        assert torch.allclose(ours, theirs.double(), rtol=3 * 2.0**-24, atol=0)  # theirs is computed in float32
    assert torch.allclose(reference.code_map("dynamic4", True), torch.tensor(torchao.create_dynamic_map(True, 3, 4)).double(), rtol=3 * 2.0**-24)


@pytest.mark.core(*(row["name"] for row in testing.rows("decode_state") if row["available"]))
@pytest.mark.parametrize("format, signed", MAPS)
def test_every_code_decodes_to_the_map_and_zero_and_one_exactly(isa: str, format: str, signed: bool, subtests: pytest.Subtests) -> None:
    codes, wanted = all_codes(format), reference.code_map(format, signed)
    block = max(len(codes), 64)
    for scale in (1.0, 3.7e-5, 2.0**-126, 1e30):
        with subtests.test(scale=scale):
            values = decode(isa, codes, torch.tensor([scale]), format, signed, block)
            exact = wanted * torch.tensor(scale).double()
            nan = exact.isnan()
            assert torch.equal(values.isnan(), nan)
            error = (values.double() - exact)[~nan].abs()
            # the closed form of the dynamic maps is off by at most five roundings, the product with the scale by one more (subnormals: their step)
            assert (error <= DECODING * 2.0**-24 * exact[~nan].abs() + 2.0**-149).all(), (scale, error.max())
            assert torch.equal(values[wanted == 0], torch.zeros_like(values[wanted == 0]))
            assert (values[wanted == 1.0] == torch.tensor(scale)).all()


@pytest.mark.parametrize("format, signed", MAPS)
def test_encoding_what_a_code_means_gives_the_code(isa: str, format: str, signed: bool, subtests: pytest.Subtests) -> None:
    codes = all_codes(format)
    if format == "float8":
        codes = codes[(codes & 0x7F) != 0x7F]  # nan
        codes = codes[codes != 0x80] if signed else codes[codes < 0x80]  # -0 is as good as 0
    values = reference.code_map(format, signed)[codes.long()]
    for scale in (1.0, 3.7e-5, 1e-37, 1e30):
        with subtests.test(scale=scale):
            found, scales = encode(isa, (values * scale).float(), format, signed, 256)
            assert torch.equal(found, codes), (scale, codes[found != codes], found[found != codes])
            assert math.isclose(scales.item(), scale, rel_tol=2.0**-22)


def hard_values(format: str, signed: bool) -> Tensor:
    """Relative values in float32: every magnitude, both sides of the middle between all neighbouring codes, zeros; the largest is 1."""
    generator = torch.Generator().manual_seed(1)
    map = reference.code_map(format, signed)
    map = map[map.isfinite()].unique()  # sorted
    map = map / map.abs().max()
    middles = ((map[1:] + map[:-1]) / 2).float()
    near = torch.cat([(middles.double() * (1 + k * 2.0**-21)).float() for k in (-16, -4, -2, 2, 4, 16)])
    spread = 10 ** (torch.rand(200_000, generator=generator) * 9 - 9)
    normal = torch.randn(100_000, generator=generator)
    values = torch.cat([near, spread, normal / normal.abs().max(), torch.zeros(7), torch.tensor([1e-30, 1e-45])])
    values = values if signed else values.abs()
    if signed:
        values[::3] *= -1
    return values.clamp(-1, 1)[torch.randperm(len(values), generator=generator)]


@pytest.mark.core(*(row["name"] for row in ROWS))
@pytest.mark.parametrize("format, signed", MAPS)
def test_encoding_finds_the_nearest_value_but_for_ties(isa: str, format: str, signed: bool) -> None:
    block = 64
    values = hard_values(format, signed)
    values = torch.nn.functional.pad(values, (0, -len(values) % (block - 1))).view(-1, block - 1)
    values = torch.cat([values, torch.ones(len(values), 1)], dim=1)  # so that every block has absmax 1
    codes, scale = encode(isa, values.flatten(), format, signed, block)
    top = reference.largest_code(format)
    assert torch.equal(scale, torch.full_like(scale, 1 / top))
    relative = values.flatten().double() * top
    map = reference.code_map(format, signed)
    found = (map[codes.long()] - relative).abs()
    nearest = (map[reference.nearest_code(relative, format, signed)] - relative).abs()
    # a value may lie 6e-7 of itself (10 roundings) away from the middle of two codes: "nearest" is then either, and the difference twice that
    assert (found <= nearest + 20 * 2.0**-24 * relative.abs()).all(), (relative[(found - nearest).argmax()], codes[(found - nearest).argmax()])
    strict = (found - nearest).abs() > 0
    assert strict.float().mean() < 1e-3  # only the values placed there
    if format != "dynamic4" or signed:
        assert (map[codes[relative == 0].long()] == 0).all()


@pytest.mark.parametrize("format", CODED)
@pytest.mark.parametrize("absmax", [1.0, 2.0**-100, 2.0**100])
def test_a_moment_without_sign_that_is_above_zero_keeps_a_code_above_that_of_zero(isa: str, format: str, absmax: float) -> None:
    """Its root divides the step: 0 in its place gives steps of 1e5 learning rates (tests/optim/test_small_moments.py)."""
    values = absmax * 2.0 ** -torch.arange(0, 24, 0.25).double()
    values = torch.cat([values.float(), torch.zeros(3), torch.full((29,), absmax * 2.0**-70)])
    codes, scale = encode(isa, values, format, False, 128)
    back = decode(isa, codes, scale, format, False, 128)
    smallest = reference.code_map(format, False)
    smallest = smallest[smallest > 0].min() * scale.double().item()
    assert (back[values > 0] >= smallest * (1 - 2.0**-20)).all() and back[-1] <= smallest * (1 + 2.0**-20)
    assert (back[96:99] == (smallest.float() if format == "dynamic4" else 0)).all()


@pytest.mark.parametrize("format, signed", MAPS)
@pytest.mark.parametrize("block_size", [64, 128, 256, 1024, 4096])
def test_any_number_of_elements_and_any_block(isa: str, format: str, signed: bool, block_size: int, subtests: pytest.Subtests) -> None:
    for numel in NUMELS:
        with subtests.test(numel=numel):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 1e-3
            values = values if signed else values.abs()
            codes, scale = encode(isa, values, format, signed, block_size)
            wanted = reference.scales(values, format, block_size)
            assert torch.allclose(scale.double(), wanted, rtol=2.0**-23, atol=0)
            back = reference.decode(codes, scale, format, signed, block_size)
            spread = scale.double().repeat_interleave(block_size)[:numel]
            best = reference.code_map(format, signed)[reference.nearest_code(values.double() / spread, format, signed)] * spread
            assert ((back - values).abs() <= (best - values).abs() + 20 * 2.0**-24 * values.abs()).all(), numel
            ours = decode(isa, codes, scale, format, signed, block_size)
            assert torch.allclose(ours.double(), back, rtol=DECODING * 2.0**-24, atol=0)


@pytest.mark.parametrize("format, signed", MAPS)
def test_zeros_stay_zeros_and_a_block_without_a_number_is_nan(isa: str, format: str, signed: bool, subtests: pytest.Subtests) -> None:
    for bad in (math.nan, math.inf, -math.inf)[: 3 if signed else 2]:
        with subtests.test(bad=bad):
            values = torch.ones(4 * 64)
            values[64:128] = 0
            values[130] = bad
            values[192:] = 1e-39  # too small for a scale
            codes, scale = encode(isa, values, format, signed, 64)
            back = decode(isa, codes, scale, format, signed, 64)
            assert torch.equal(back[:128], values[:128])
            assert back[128:192].isnan().all(), bad
            assert torch.equal(back[192:], torch.zeros(64))


def test_first_code_of_a_pair_is_in_the_high_nibble() -> None:
    codes, scale = torch.empty(1, dtype=torch.uint8), torch.empty(1)
    _C.encode_state(torch.tensor([1.0, -0.4375]), _C.STATE_FORMATS["dynamic4"], True, 64, codes, scale)
    assert codes.item() == 15 << 4 | 2


@pytest.mark.parametrize("signed", [True, False])
def test_float8_codes_are_those_of_torch(isa: str, signed: bool) -> None:
    values = hard_values("float8", signed) * 448
    values[::64] = 448.0  # the scale of every block is 1
    codes, scale = encode(isa, values, "float8", signed, 64)
    theirs = values.to(torch.float8_e4m3fn).view(torch.uint8)
    if not signed:  # what is above 0 keeps the smallest code
        theirs = torch.where(values > 0, theirs.clamp(min=1), theirs)
    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal(codes, theirs)


@pytest.mark.parametrize("format, signed", MAPS)
def test_rows_agree_bit_for_bit(format: str, signed: bool) -> None:
    values = hard_values(format, signed)[:50_001]
    assert len(ISAS) > 1
    results = []
    for isa in ISAS:
        codes, scale = encode(isa, values, format, signed, 256)
        results.append((codes, scale, decode(isa, codes, scale, format, signed, 256)))
    for result in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0], strict=True))


@pytest.mark.parametrize("change, error, text", [
    (dict(values=torch.zeros(100, dtype=torch.float64)), TypeError, "float32"),
    (dict(codes=torch.zeros(99, dtype=torch.uint8)), ValueError, "codes"),
    (dict(codes=torch.zeros(100, dtype=torch.int32)), TypeError, "codes"),
    (dict(scale=torch.zeros(1)), ValueError, "scale"),
    (dict(scale=torch.zeros(2, dtype=torch.float64)), TypeError, "scale"),
    (dict(block_size=100), ValueError, "block_size"),
    (dict(block_size=0), ValueError, "block_size"),
    (dict(block_size=8192), ValueError, "block_size"),
    (dict(format=99), ValueError, "format"),
    (dict(values=torch.zeros(100, 2)[:, 0]), ValueError, "dense"),
])  # fmt: skip
def test_bad_arguments_say_what_was_wanted(change: dict[str, object], error: type[Exception], text: str) -> None:
    given = dict(values=torch.zeros(100), format=_C.STATE_FORMATS["dynamic8"], block_size=64,
                 codes=torch.zeros(100, dtype=torch.uint8), scale=torch.zeros(2)) | change  # fmt: skip
    with pytest.raises(error, match=rf"encode_state: .*{text}.*"):
        _C.encode_state(given["values"], given["format"], True, given["block_size"], given["codes"], given["scale"])
    if "values" in change and change["values"].dim() > 1:
        return
    with pytest.raises(error, match=rf"decode_state: .*{text}.*"):
        _C.decode_state(given["codes"], given["scale"], given["format"], True, given["block_size"], given["values"])
