# SPDX-License-Identifier: Apache-2.0
"""Every ready-made mask against a definition in plain Python loops, its picture, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowbit.attention import masks
from lowbit.attention.mod import MaskMod

L = 24
IDS = torch.tensor([0] * 5 + [1] * 9 + [4] * 10)
GLOBAL = torch.zeros(L, dtype=torch.bool).index_fill(0, torch.tensor([0, 11]), True)
START = [0] * 5 + [5] * 9 + [14] * 10


def _diffusion(q: int, k: int) -> bool:  # 12 noised tokens, then 12 clean ones, blocks of 4
    q_noised, k_noised, q_block, k_block = q < 12, k < 12, q % 12 // 4, k % 12 // 4
    if q_noised:
        return q_block == k_block if k_noised else k_block < q_block
    return not k_noised and k_block <= q_block


def _natten(q: int, k: int) -> bool:  # 4 rows of 6 pixels, window 3 x 5
    top, left = min(max(q // 6 - 1, 0), 4 - 3), min(max(q % 6 - 2, 0), 6 - 5)
    return top <= k // 6 < top + 3 and left <= k % 6 < left + 5


CASES: dict[str, tuple[MaskMod, Callable[[int, int], bool]]] = {
    "causal": (masks.causal, lambda q, k: k <= q),
    "sliding_window": (masks.sliding_window(5), lambda q, k: q - 5 <= k <= q),
    "sliding_window_0": (masks.sliding_window(0), lambda q, k: k == q),
    "prefix_lm": (masks.prefix_lm(7), lambda q, k: k < 7 or k <= q),
    "prefix_lm_batch": (masks.prefix_lm(torch.tensor([2, 9])), lambda q, k: k < 9 or k <= q),
    "document": (masks.document(IDS), lambda q, k: bool(IDS[q] == IDS[k])),
    "document_causal": (masks.document(IDS, masks.causal), lambda q, k: bool(IDS[q] == IDS[k]) and k <= q),
    "document_prefix": (
        masks.document(IDS, masks.prefix_lm(3)),
        lambda q, k: bool(IDS[q] == IDS[k]) and (k - START[k] < 3 or k <= q),
    ),
    "dilated": (masks.dilated(6, 3), lambda q, k: abs(q - k) in (0, 3, 6)),
    "global_window": (masks.global_window(2, GLOBAL), lambda q, k: abs(q - k) <= 2 or q in (0, 11) or k in (0, 11)),
    "block_diffusion": (masks.block_diffusion(12, 4), _diffusion),
    "natten": (masks.natten(4, 6, 3, 5), _natten),
    "and": (masks.causal & masks.dilated(8, 2), lambda q, k: k <= q <= k + 8 and (q - k) % 2 == 0),
    "or": (masks.causal | masks.document(IDS), lambda q, k: k <= q or bool(IDS[q] == IDS[k])),
    "not": (~masks.causal, lambda q, k: k > q),
}


@pytest.mark.parametrize("name", CASES)
def test_mask_equals_its_definition(name: str) -> None:
    mask, definition = CASES[name]
    expected = torch.tensor([[definition(q, k) for k in range(L)] for q in range(L)])
    assert torch.equal(mask.dense(L, b=1), expected)


@pytest.mark.parametrize("name", CASES)
def test_torch_takes_the_mask(name: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    mask, _ = CASES[name]
    assert torch.equal(create_mask(mask, 2, 1, L, L, device="cpu")[1, 0], mask.dense(L, b=1))


def test_pictures() -> None:
    assert masks.causal.text(3) == "█\n██\n███"
    assert (~masks.causal).text(2, 3) == " ██\n  █"
    assert repr(masks.causal & masks.sliding_window(2)) == "(causal & sliding_window(2))"


def test_plot_draws_the_mask() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = masks.sliding_window(3).plot(10, 12)
    assert axes.get_title() == "sliding_window(3)"
    assert axes.images[0].get_array().shape == (10, 12)


def test_document_ids_of_lengths() -> None:
    assert masks.document_ids(torch.tensor([0, 2, 2, 5])).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: masks.sliding_window(-1), "sliding_window: window must be at least 0, got window=-1"),
        (lambda: masks.prefix_lm(-2), "prefix_lm: prefix must be at least 0, got prefix=-2"),
        (lambda: masks.prefix_lm(torch.zeros(2, 2)), r"prefix_lm: prefix must be an int or a tensor \[B\], got shape \[2, 2\]"),
        (lambda: masks.document(torch.zeros(2, 2)), r"document: ids must have shape \[L\], got \[2, 2\]"),
        (lambda: masks.dilated(4, 0), "dilated: window must be at least 0 and dilation at least 1, got window=4 dilation=0"),
        (lambda: masks.global_window(1, torch.zeros(3)), r"global_window: is_global must be bool \[L\], got torch.float32 \[3\]"),
        (lambda: masks.block_diffusion(0, 2), "block_diffusion: length and block_size must be at least 1, got length=0 block_size=2"),
        (lambda: masks.natten(4, 4, 2), r"natten: kernel_height must be odd and in 1\.\.4, got kernel_height=2"),
        (lambda: masks.natten(4, 4, 3, 5), r"natten: kernel_width must be odd and in 1\.\.4, got kernel_width=5"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], MaskMod], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
