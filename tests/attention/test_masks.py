# SPDX-License-Identifier: Apache-2.0
"""Every ready-made mask against a definition in plain Python loops, its picture, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

import lowbit
from lowbit.attention import masks
from lowbit.score.mod import MaskMod

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
    "sliding_window": (masks.sliding_window(5), lambda q, k: q - 5 < k <= q),
    "sliding_window_1": (masks.sliding_window(1), lambda q, k: k == q),
    "prefix_lm": (masks.prefix_lm(7), lambda q, k: k < 7 or k <= q),
    "prefix_lm_batch": (masks.prefix_lm(torch.tensor([2, 9])), lambda q, k: k < 9 or k <= q),
    "document": (masks.document(IDS), lambda q, k: bool(IDS[q] == IDS[k])),
    "document_causal": (masks.document(IDS, masks.causal), lambda q, k: bool(IDS[q] == IDS[k]) and k <= q),
    "document_prefix": (
        masks.document(IDS, masks.prefix_lm(3)),
        lambda q, k: bool(IDS[q] == IDS[k]) and (k - START[k] < 3 or k <= q),
    ),
    "document_batch": (masks.document(torch.stack([IDS * 0, IDS])), lambda q, k: bool(IDS[q] == IDS[k])),
    "document_batch_prefix": (
        masks.document(torch.stack([IDS * 0, IDS]), masks.prefix_lm(3)),
        lambda q, k: bool(IDS[q] == IDS[k]) and (k - START[k] < 3 or k <= q),
    ),
    "dilated": (masks.dilated(6, 3), lambda q, k: abs(q - k) in (0, 3, 6)),
    "global_window": (masks.global_window(2, GLOBAL), lambda q, k: abs(q - k) <= 2 or q in (0, 11) or k in (0, 11)),
    "block_diffusion": (masks.block_diffusion(12, 4), _diffusion),
    "natten": (masks.natten(4, 6, 3, 5), _natten),
    "and": (masks.causal & masks.dilated(8, 2), lambda q, k: k <= q <= k + 8 and (q - k) % 2 == 0),
    "or": (masks.causal | masks.document(IDS), lambda q, k: k <= q or bool(IDS[q] == IDS[k])),
    "not": (~masks.causal, lambda q, k: k > q),
    "function and": ((lambda b, h, q, k: k != 3) & masks.causal, lambda q, k: k != 3 and k <= q),
    "function or": ((lambda b, h, q, k: k == 9) | masks.causal, lambda q, k: k == 9 or k <= q),
    "and function": (masks.causal & (lambda b, h, q, k: k != 3), lambda q, k: k != 3 and k <= q),
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


def test_plot_without_matplotlib_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="plot needs matplotlib: pip install matplotlib"):
        masks.causal.plot(4)


@pytest.mark.parametrize("window", (1, 4, 7))
def test_a_window_of_w_has_w_keys_as_in_transformers_and_the_cache(window: int) -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    i = torch.arange(L)
    mask = masks.sliding_window(window)
    theirs = sliding_window_causal_mask_function(window)
    assert int(mask.dense(L).sum(-1).max()) == window
    assert torch.equal(mask.dense(L), torch.tensor([[bool(theirs(i[0], i[0], i[q], i[k])) for k in range(L)] for q in range(L)]))
    query, key, value = (torch.randn(1, 2, L, 64) for _ in range(3))
    cache = lowbit.QuantizedKVCache("int8")
    cache.append(0, key, value)
    ours = lowbit.flex_attention(query, key, value, block_mask=lowbit.create_block_mask(mask, None, None, L, L))
    torch.testing.assert_close(cache.attend(0, query, window=window), ours, atol=0.05, rtol=0.05)


def test_a_plot_shows_its_labels_whole() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    block_mask = lowbit.create_block_mask(masks.sliding_window(40), None, None, 256, 200, BLOCK_SIZE=(16, 32))
    for axes in (masks.causal.plot(), lowbit.attention.plot(block_mask), lowbit.attention.plot(lambda b, h, q, k: q >= k, 8, 12)):
        figure = axes.figure
        figure.canvas.draw()
        size = figure.get_size_inches() * figure.dpi
        for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
            box = label.get_window_extent()
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= size[0] and box.y1 <= size[1], label.get_text()
        plt.close(figure)


def test_plot_draws_a_block_mask() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    block_mask = lowbit.create_block_mask(masks.causal, None, None, 64, 64, BLOCK_SIZE=16)
    axes = lowbit.attention.plot(block_mask)
    assert axes.images[0].get_array().tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    assert tuple(axes.images[0].get_extent()) == (0, 64, 64, 0) and axes.get_title() == "causal, blocks of 16 x 16"
    assert lowbit.attention.plot(lambda s, b, h, q, k: s + q - k, 4).images[0].get_array().shape == (4, 4)
    for bad in (3, lambda x: x):
        with pytest.raises(TypeError, match="plot: mod must be a BlockMask, or take 4"):
            lowbit.attention.plot(bad)


def test_document_ids_of_lengths() -> None:
    assert masks.document_ids(torch.tensor([0, 2, 2, 5])).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: masks.sliding_window(0), r"sliding_window: window must be at least 1 \(a query sees itself\), got window=0"),
        (lambda: masks.prefix_lm(-2), "prefix_lm: prefix must be at least 0, got prefix=-2"),
        (lambda: masks.prefix_lm(torch.zeros(2, 2)), r"prefix_lm: prefix must be an int or a tensor \[B\], got shape \[2, 2\]"),
        (lambda: masks.document(torch.zeros(2, 2, 2)), r"document: ids must have shape \[L\] or \[B, L\], got \[2, 2, 2\]"),
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
