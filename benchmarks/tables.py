# SPDX-License-Identifier: Apache-2.0
"""The tables of the pages, rendered from result files: the cells of each page, and its words about where they are from.

A table gets its runs by the instruction set that each was held to, best last: {"AVX2": head, "AVX-512 VNNI": head}. On
a machine with AVX2 alone there is one. A candidate that took no part (a peer that is not installed) has no row; the
line below the table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Runs = dict[str, dict[str, Any]]
M = (1, 4, 32, 512)
ZEN = {(25, 0x01): "Zen 3", (25, 0x11): "Zen 4", (25, 0xA0): "Zen 4", (26, 0x02): "Zen 5", (26, 0x11): "Zen 5"}
XEON = {85: "Skylake-X", 106: "Ice Lake", 143: "Sapphire Rapids", 207: "Emerald Rapids", 173: "Granite Rapids"}

Rows = Sequence[tuple[str, str]]  # name in the page, name in the results
README_LINEAR: Rows = (
    ("torch float32", "torch fp32"),
    ("torch dynamic quantized", "torch dynamic quantized"),
    ("torch int4pack, bfloat16 activations", "torch int4pack g128 (bf16)"),
    ("torchao int8 weight-only", "torchao int8 weight-only"),
    ("torchao int8 dynamic", "torchao int8 dynamic"),
    ("llama.cpp Q4_0", "llama.cpp q4_0"),
    ("llama.cpp Q8_0", "llama.cpp q8_0"),
    ("**lowbit** int4 weight, int8 activation", "W4A8 g32"),
    ("**lowbit** int8 weight, int8 activation", "W8A8"),
    ("**lowbit** int8 weight-only", "int8 weight-only"),
)
DOCS_LINEAR: Rows = (
    ("torch float32", "torch fp32"),
    ("int4 weight, int8 activation, g32", "W4A8 g32"),
    ("int8 weight, int8 activation", "W8A8"),
    ("int8 weight-only", "int8 weight-only"),
    ("int4 weight-only, g128", "int4 weight-only g128"),
    ("bfloat16 weight", "dense bf16"),
)
OPTIM: Rows = (
    ("`AdamW8bit`", "AdamW8bit"),
    ("`AdamW4bit`", "AdamW4bit"),
    ("`AdamWFp8`", "AdamWFp8"),
    ("`AdamW` with bfloat16 states", "AdamW bf16 states"),
)
DECODE: Rows = (
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("int4", "int4"),
    ("torch float32", "torch float32"), ("torch bfloat16", "torch bfloat16"),
    ("llama.cpp f16", "llama.cpp f16"), ("llama.cpp q8_0", "llama.cpp q8_0"),
)  # fmt: skip
SDPA_SHAPES = ((1, 8, 512, 64), (1, 4, 2048, 64), (1, 2, 4096, 128))


def source(runs: Runs) -> str:
    """Say where figures are from: machine, threads, versions, commit, date, and the load of the machine."""
    heads = list(runs.values())
    head = heads[-1]
    told = [f"Measured {head['date'][:10]} at commit {head['commit']} on {head['threads']} threads of {cpu(head)}"]
    told.append(f"torch {head['versions']['torch']}")
    others = max(run.get("foreign_cpu_share") or 0 for run in heads)
    told.append(f"other processes took {100 * others:.0f} % of the CPU time")
    text = ", ".join(told) + "."
    if len(runs) > 1:
        text += " AVX2: the same machine, limited to AVX2 by benchmarks/measure.py; what it cannot limit is left out."
    return text


def cpu(head: dict[str, Any]) -> str:
    """The processor by a name that says its generation."""
    machine = head["machine"]
    family, model, _ = (int(number or 0) for number in machine.get("family_model_stepping", ("0", "0", "0")))
    name = machine.get("cpu", "an unknown processor")
    generation = ZEN.get((family, model)) if "AMD" in name else XEON.get(model)
    return f"{name} ({generation})" if generation and generation not in name else name


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table without padding: a new figure changes its own line alone."""
    title, *lines = ("| " + " | ".join(line) + " |" for line in (columns, *rows))
    return "\n".join([title, "|---" * len(columns) + "|", *lines])


def milliseconds(seconds: float) -> str:
    """Three figures in ms: the figures of a column compare at a glance."""
    value = 1e3 * seconds
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def missing(runs: Runs, rows: Rows, cells: Callable[[dict[str, Any]], set[str]]) -> str:
    """The line that names peers and cells that a table could have and has not."""
    absent = [name for name, key in rows if not any(key in cells(head) for head in runs.values())]
    return f"Not here: {', '.join(absent)}." if absent else ""


def linear_cells(head: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["candidate"], row["m"]): row for row in head["results"]}


def readme_linear(runs: Runs) -> str:
    """Times; the best of each column is bold."""
    columns = [(isa, m) for isa in runs for m in M]
    found = {isa: linear_cells(head) for isa, head in runs.items()}
    shown = {key for _, key in README_LINEAR}
    best = {}
    for isa, m in columns:
        best[isa, m] = min(row["best_s"] for (name, at), row in found[isa].items() if at == m and name in shown)
    rows = []
    for name, key in README_LINEAR:
        cells = [name]
        for isa, m in columns:
            row = found[isa].get((key, m))
            text = "" if row is None else milliseconds(row["best_s"])
            cells.append(f"**{text}**" if row and row["best_s"] == best[isa, m] else text)
        if any(cells[1:]):
            rows.append(cells)
    return _with_gaps(table(_headings(runs), rows), runs, README_LINEAR, _linear_names)


def docs_linear(runs: Runs) -> str:
    """Ratios to torch float32."""
    found = {isa: linear_cells(head) for isa, head in runs.items()}
    rows = []
    for name, key in DOCS_LINEAR:
        rows.append([name])
        for isa in runs:
            for m in M:
                row = found[isa][key, m]
                rows[-1].append(milliseconds(row["best_s"]) if key == "torch fp32" else f"{row['ratio']:.1f}x")
    return table(_headings(runs), rows)


def _headings(runs: Runs) -> list[str]:
    return ["", *(f"{isa}, M={m}" if m == M[0] else f"M={m}" for isa in runs for m in M)]


def _linear_names(head: dict[str, Any]) -> set[str]:
    return {row["candidate"] for row in head["results"]}


def _with_gaps(text: str, runs: Runs, rows: Rows, names: Callable[[dict[str, Any]], set[str]]) -> str:
    gaps = missing(runs, rows, names)
    return f"{text}\n\n{gaps}" if gaps else text


def attention(runs: Runs) -> str:
    """Times of float32 and ratios to torch's function of the same dtype, by direction."""
    rows = []
    for isa, head in runs.items():
        found = {
            (row["direction"], tuple(row["shape"]), row["dtype"], row["causal"]): row for row in head["results"]["sdpa"]
        }
        for shape in SDPA_SHAPES:
            for causal in (False, True):
                label = f"{' x '.join(map(str, shape))} {'causal' if causal else 'full'}"
                rows.append([f"{isa}, {label}" if len(runs) > 1 else label])
                for direction in ("forward", "backward"):
                    plain, half = (found[direction, shape, dtype, causal] for dtype in ("float32", "bfloat16"))
                    rows[-1] += [milliseconds(plain["lowbit_s"]), f"{plain['ratio']:.2f}x", f"{half['ratio']:.2f}x"]
    return table(["B x H x L x D", "forward float32", "", "bfloat16", "backward float32", "", "bfloat16"], rows)


def flex(runs: Runs) -> str:
    """Forward times beside torch's compiled function."""
    rows = []
    for isa, head in runs.items():
        for row in head["results"]["flex"]:
            if "torch_first_s" in row and row["dtype"] == "float32":
                label = f"{isa}, {row['name']}" if len(runs) > 1 else row["name"]
                ratio = row["torch_s"] / row["lowbit_s"]
                rows.append([label, milliseconds(row["torch_s"]), milliseconds(row["lowbit_s"]), f"{ratio:.1f}x"])
    return table(["", "torch compiled", "lowbit", "ratio"], rows)


def decode(runs: Runs) -> str:
    """Milliseconds of one query over 16384 tokens, head-major."""

    def cells(head: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
        rows = (row for row in head["results"]["decode"] if row.get("layout") == "head-major")
        return {(row["candidate"], row["head_dim"]): row for row in rows if row["kv_length"] == 16384}

    def names(head: dict[str, Any]) -> set[str]:
        return {candidate for candidate, _ in cells(head)}

    shown = [(name, key) for name, key in DECODE if any(key in names(head) for head in runs.values())]
    rows = []
    for isa, head in runs.items():
        found = cells(head)
        for head_dim in sorted({at for _, at in found}):
            figures = (found.get((key, head_dim)) for _, key in shown)
            times = (f"{1e3 * row['best_s']:#.3g}".rstrip(".") if row else "" for row in figures)
            rows.append([f"{isa}, D = {head_dim}", *times])
    return _with_gaps(table(["ms", *(name for name, _ in shown)], rows), runs, DECODE, names)


def optim(runs: Runs) -> str:
    """Milliseconds of a step, and speed relative to torch's fused AdamW."""
    found = {isa: {(row["problem"], row["candidate"]): row for row in head["results"]} for isa, head in runs.items()}
    rows = []
    for problem in ("float32", "bfloat16"):
        title = f"{problem} parameters: torch fused AdamW"
        for name, key in ((title, "torch fused"), *OPTIM):
            rows.append([name])
            for isa in runs:
                row = found[isa][problem, key]
                ratio = "" if key == "torch fused" else f" ({row['ratio']:.2f}x)"
                rows[-1].append(f"{1e3 * row['best_s']:.1f}{ratio}")
    return table(["ms", *runs], rows)
