# SPDX-License-Identifier: Apache-2.0
"""create_block_mask returns torch's BlockMask, field for field; what it refuses."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import lowbit
from lowbit import and_masks, create_block_mask, noop_mask, or_masks
from lowbit.attention.block_mask import from_classes, to_classes
from lowbit.score import program_cache

_FIELDS = [f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")]
IDS, LENGTHS = torch.tensor([0] * 70 + [3] * 1 + [1] * 129 + [2] * 200), torch.tensor([0, 17, 400])
MASKS: dict[str, Callable[..., Tensor]] = {
    "noop": noop_mask,
    "causal": lambda b, h, q, k: q >= k,
    "offset causal": lambda b, h, q, k: q - 5 >= k + 3 * h,
    "window": lambda b, h, q, k: (q - k < 30) & (q >= k),
    "document": lambda b, h, q, k: IDS[q] == IDS[k],
    "padding": lambda b, h, q, k: k < LENGTHS[b],
    "dilated": lambda b, h, q, k: ((q - k).abs() % 3 == 0) & ((q - k).abs() < 60),
    "blocks": lambda b, h, q, k: q // 16 == k // 16,
    "bits": lambda b, h, q, k: ((q ^ k) & 3) == h,
    "nothing": lambda b, h, q, k: q < -1,
    "and": and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: IDS[q] == IDS[k]),
    "or": or_masks(lambda b, h, q, k: k < 20, lambda b, h, q, k: q >= k),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("lengths", "block"), list(itertools.product([(400, 400), (256, 384), (1, 130), (129, 1)], [128, (16, 48), (64, 1)])), ids=str)
def test_fields_are_torchs(name: str, lengths: tuple[int, int], block: Any) -> None:
    batch, heads = (3, 2) if name in ("padding", "offset causal", "bits") else (None, None)
    known = "separate_full_blocks" in inspect.signature(torch_flex.create_block_mask).parameters  # torch 2.11 has no such argument
    for options in ({}, {"separate_full_blocks": False}) if known else ({},):
        ours = create_block_mask(MASKS[name], batch, heads, *lengths, BLOCK_SIZE=block, **options)
        theirs = torch_flex.create_block_mask(MASKS[name], batch, heads, *lengths, "cpu", BLOCK_SIZE=block, **options)
        assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE and ours.shape == theirs.shape
        for field in _FIELDS:
            a, b = getattr(ours, field), getattr(theirs, field)
            assert (a is None) == (b is None), field
            assert a is None or a.dtype == b.dtype and torch.equal(a, b), field


def test_it_is_torchs_class_with_its_methods() -> None:
    mask = create_block_mask(MASKS["causal"], 2, 2, 512, 512)
    assert type(mask) is torch_flex.BlockMask is lowbit.BlockMask
    assert mask.sparsity() == pytest.approx(37.5) and mask.to_dense().shape == (2, 2, 4, 4)
    assert mask[0:1].kv_num_blocks.shape == (1, 2, 4)
    assert mask._adjust(200, 200).shape == torch_flex.create_block_mask(MASKS["causal"], 2, 2, 512, 512, "cpu")._adjust(200, 200).shape
    assert lowbit.create_mask is torch_flex.create_mask


@pytest.mark.parametrize("name", ["causal", "document", "noop", "nothing"])
def test_classes_and_lists_are_inverses(name: str) -> None:
    mask = create_block_mask(MASKS[name], 2, 3, 400, 300, BLOCK_SIZE=(32, 64))
    again = from_classes(to_classes(mask), mask.mask_mod, mask.seq_lengths, mask.BLOCK_SIZE)
    assert all(torch.equal(getattr(mask, field), getattr(again, field)) for field in _FIELDS)


def test_an_op_without_a_program_goes_through_torch() -> None:
    mask_mod = lambda b, h, q, k: torch.special.bessel_j0((q - k) / 50) > 0  # noqa: E731
    program_cache._warned.clear()
    with pytest.warns(UserWarning, match="mask_mod uses aten.special_bessel_j0"):
        ours = create_block_mask(mask_mod, None, None, 300, 300)
    theirs = torch_flex.create_block_mask(mask_mod, None, None, 300, 300, "cpu")
    assert all(torch.equal(getattr(ours, field), getattr(theirs, field)) for field in _FIELDS)


def test_memory_grows_with_the_blocks_not_with_the_scores() -> None:
    mask = create_block_mask(MASKS["causal"], None, None, 2**20, 2**20, BLOCK_SIZE=2**13)  # a dense mask would be 1 TiB
    assert mask.full_kv_num_blocks.sum() == 128 * 127 // 2


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mask_mod": lambda s, b, h, q, k: s}, AssertionError, "mask_mod must take"),
        ({"mask_mod": 3}, AssertionError, "mask_mod must be callable, got int"),
        ({"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE must be at least 1, got 0"),
        ({"Q_LEN": -1}, ValueError, "Q_LEN must be at least 0, got -1"),
        ({"mask_mod": lambda b, h, q, k: q - k}, ValueError, "mask_mod must return a bool tensor, got int32"),
        ({"mask_mod": lambda b, h, q, k: True}, ValueError, "mask_mod must return a tensor, got bool"),
        ({"mask_mod": lambda b, h, q, k: k if q > k else q}, RuntimeError, "mask_mod must not use the value"),
        ({"mask_mod": lambda b, h, q, k: IDS[q + 400] == 0}, IndexError, "reads index"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {"mask_mod": MASKS["causal"], "B": None, "H": None, "Q_LEN": 64, "KV_LEN": 64} | change
    with pytest.raises(error, match=text):
        create_block_mask(**arguments)
