# SPDX-License-Identifier: Apache-2.0
"""Blocks of GGUF as packed weights: each type against the gguf package's own decoding."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf_files import HALVES, random_blocks

import lowbit
from lowbit import _C, testing
from lowbit.checkpoints.gguf import saving
from lowbit.checkpoints.gguf.blocks import BLOCK_TYPES, pack_blocks
from lowbit.formats.spec import StoredWeight
from lowbit.quant.codes import CodedWeight


def decoded(type: str, blocks, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight as the gguf package reads it, and as the packed weight does."""
    wanted = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[type]).copy())
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][1]
    packed = pack_blocks(torch.from_numpy(blocks).view(len(blocks), -1, size), BLOCK_TYPES[type])
    ours = torch.ops.lowbit.dequantize(packed, *BLOCK_TYPES[type].spec("float").weight_args(len(blocks), k))
    return wanted, ours


def minimums(type: str, blocks, k: int) -> torch.Tensor:
    """The number that is added to each weight of a type with minimums, ``[n, k]``: the value of code 0; 0 for the
    others."""
    if not BLOCK_TYPES[type].asymmetric:
        return torch.zeros(len(blocks), k)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][1]
    first, end = {"Q4_1": (4, 20), "Q5_1": (4, 24), "Q2_K": (16, 80), "Q4_K": (16, 144), "Q5_K": (16, 176)}[type]
    without_codes = blocks.reshape(len(blocks), -1, size).copy()
    without_codes[..., first:end] = 0
    return torch.from_numpy(gguf.dequantize(without_codes.reshape(blocks.shape), gguf.GGMLQuantizationType[type]).copy())


def bound_of(type: str) -> float:
    """As docs/gguf.md has it, of |w - minimum| + |minimum|."""
    return 1.001 * 2.0 ** (-10 if BLOCK_TYPES[type].asymmetric and BLOCK_TYPES[type].products else -11)


def test_every_type_that_is_read_has_its_case():
    assert BLOCK_TYPES.keys() == HALVES.keys()


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_blocks_mean_what_the_gguf_package_says(type, seed, spread):
    k = 512 if seed % 2 else 768
    blocks = random_blocks(type, 19, k, seed, spread)
    wanted, ours = decoded(type, blocks, k)
    if not BLOCK_TYPES[type].asymmetric and not BLOCK_TYPES[type].products:
        assert torch.equal(ours, wanted)
        return
    least = minimums(type, blocks, k)
    # The last: a float16 beside the largest of its row, and float32 around the middle code.
    bound = bound_of(type) * ((wanted - least).abs() + least.abs()) + wanted.abs().amax(1, keepdim=True) * 2.0**-16
    assert ((ours - wanted).abs() <= bound).all()
    assert not torch.equal(ours, wanted)  # else the table of docs/gguf.md could say "exact"


@pytest.mark.parametrize("type", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_a_group_that_is_its_minimum_alone(type):
    """A scale of 0, and one so small that the zero point would be no float16."""
    k = 256
    blocks = random_blocks(type, 4, k)
    first = HALVES[type][0]
    for row, scale in enumerate((0.0, 6e-8, -6e-8, 1e-6)):
        blocks[row].reshape(-1, len(blocks[row]) // (k // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][0]))[
            :, first : first + 2
        ] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8).numpy()
    wanted, ours = decoded(type, blocks, k)
    least = minimums(type, blocks, k)
    assert ((ours - wanted).abs() <= bound_of(type) * ((wanted - least).abs() + least.abs()) + 2.0**-40).all()


@pytest.mark.parametrize("type", [type for type, halves in HALVES.items() if halves])
def test_a_scale_that_is_not_finite_is_refused(type):
    blocks = random_blocks(type, 2, 256)
    at = HALVES[type][0]
    blocks[1, at : at + 2] = torch.tensor([torch.inf], dtype=torch.float16).view(torch.uint8).numpy()
    with pytest.raises(ValueError, match="must be finite"):
        decoded(type, blocks, 256)


@pytest.mark.core
@pytest.mark.parametrize("row", [row["name"] for row in testing.rows("repack") if "gguf" in str(row["name"])])
@pytest.mark.parametrize("type", _C.GGUF_TYPES)
def test_the_packed_bytes_are_those_of_the_codes_and_scales(type, row):
    """Sums and padding of n and k too."""
    n, k = 19, 256 if BLOCK_TYPES[type].weights == 256 else 96
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][1]
    with lowbit.force_kernel(row):
        packed = pack_blocks(torch.from_numpy(random_blocks(type, n, k)).view(n, -1, size), BLOCK_TYPES[type])
    weight = CodedWeight.unpack(packed, StoredWeight(BLOCK_TYPES[type].spec("float"), n, k, _C.LAYOUT))
    assert torch.equal(weight.pack(), packed)
    rows = pack_blocks(torch.from_numpy(random_blocks(type, n, k)).view(n, -1, size), BLOCK_TYPES[type], "row-major")
    assert torch.equal(weight.pack("row-major"), rows)


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_groups_in_another_order(type):
    k, group = 512, BLOCK_TYPES[type].group_size
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][1]
    order = torch.randperm(k // group, generator=torch.Generator().manual_seed(0))
    columns = (order[:, None] * group + torch.arange(group)).flatten()
    blocks = torch.from_numpy(random_blocks(type, 19, k)).view(19, -1, size)
    arguments = BLOCK_TYPES[type].spec("float").weight_args(19, k)
    plain, moved = (torch.ops.lowbit.dequantize(pack_blocks(blocks, BLOCK_TYPES[type], columns=of), *arguments) for of in (None, columns))
    assert torch.equal(moved, plain[:, columns])


@pytest.mark.parametrize("changes, error, text", [
    (dict(type=99), ValueError, r"type must be 0\.\.11, got type=99"),
    (dict(blocks=torch.zeros(17, 2, 17, dtype=torch.uint8)), ValueError, r"blocks must have shape \[n, k / 32, 18\] with 18 neighbouring bytes for Q4_0, got \[17, 2, 17\]"),
    (dict(blocks=torch.zeros(17, 2, 18)), TypeError, "blocks must be uint8, got float32"),
    (dict(places=torch.tensor([0, 0], dtype=torch.int32)), ValueError, r"places must be the numbers 0\.\.1 in another order, got 0 at 1"),
    (dict(places=torch.tensor([0, 2], dtype=torch.int32)), ValueError, r"places must be the numbers 0\.\.1 in another order, got 2 at 1"),
    (dict(out=torch.zeros(2, 100, dtype=torch.uint8)), ValueError, r"weight must have the packed shape \[2, \d+\].*, got \[2, 100\]"),
])  # fmt: skip
def test_pack_gguf_says_what_it_wanted(changes, error, text):
    out = torch.empty(BLOCK_TYPES["Q4_0"].spec("float").shape(17, 64), dtype=torch.uint8)
    given = dict(blocks=torch.zeros(17, 2, 18, dtype=torch.uint8), type=0, places=None, out=out)
    with pytest.raises(error, match=f"pack_gguf: {text}"):
        _C.pack_gguf(**given | changes)


@pytest.mark.parametrize("type", ["Q4_1", "Q5_1"])
def test_minimums_of_any_blocks(type):
    """Fuzzed: tiny and large scales, minimums of 0, and some that are too far from their scale to have a zero point."""
    n, blocks, size = 64, 32, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][1]
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (n, blocks, size), dtype=torch.uint8, generator=generator)
    sizes = torch.rand(2, n, blocks, generator=generator) * torch.tensor([14.0, 16.0])[:, None, None]
    scale, minimum = (torch.randn(2, n, blocks, generator=generator) * torch.exp2(3 - sizes)).half()
    minimum[torch.rand(n, blocks, generator=generator) < 0.1] = 0
    raw[..., :2], raw[..., 2:4] = (part[..., None].view(torch.uint8) for part in (scale, minimum))
    packed = pack_blocks(raw, BLOCK_TYPES[type])
    stored = StoredWeight(BLOCK_TYPES[type].spec("float"), n, blocks * 32, _C.LAYOUT)
    written, its_type = saving._blocks(packed, stored)
    assert its_type == type
    assert torch.equal(pack_blocks(written.view(n, blocks, size), BLOCK_TYPES[type]), packed)
