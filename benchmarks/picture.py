# SPDX-License-Identifier: Apache-2.0
"""The picture above README's table of linear layers: times the speed of torch float32, by rows and instruction set."""

from __future__ import annotations

from pathlib import Path

import tables

BARS = (  # in the results, in the legend, colour
    ("torch fp32", "torch float32", "#8e9ab3"),
    ("torch dynamic quantized", "torch dynamic quantized", "#b5b49e"),
    ("int8 weight-only", "lowbit int8 weight-only", "#90e0ef"),
    ("W8A8", "lowbit int8 x int8", "#00a6c7"),
    ("W4A8 g32", "lowbit int4 x int8", "#03588c"),
)


def draw(runs: tables.Runs, path: Path) -> None:
    """Draw one panel for each instruction set into ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(5 * len(runs), 3.2), sharey=True, squeeze=False)
    for ax, (isa, head) in zip(axes[0], runs.items()):
        found = tables.linear_cells(head)
        bars = [bar for bar in BARS if (bar[0], tables.M[0]) in found]
        width = 0.9 / len(bars)
        for number, (key, label, colour) in enumerate(bars):
            places = [group + width * (number - (len(bars) - 1) / 2) for group in range(len(tables.M))]
            ratios = [found[key, m]["ratio"] for m in tables.M]
            drawn = ax.bar(places, ratios, width, label=label, color=colour)
            if key != "torch fp32":
                ax.bar_label(drawn, [f"{ratio:.2g}" for ratio in ratios], fontsize=6)
        ax.set_title(isa)
        ax.set_xticks(range(len(tables.M)), [f"{m} row{'s' if m > 1 else ''}" for m in tables.M])
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=7)
    axes[0][0].set_ylabel("times the speed of torch float32")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
