# SPDX-License-Identifier: Apache-2.0
"""benchmarks/measure.py makes the tables of the pages from result files: here from recorded ones, of a machine with AVX2."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from in_folder import module_in

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "measured"


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    return module_in("benchmarks", "measure")


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in (rows[0], *rows[2:])}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_every_table_of_a_benchmark_is_made_of_its_result_file(measure: ModuleType, name: str) -> None:
    head = recorded(name)
    for make in measure.BENCHMARKS[name].tables.values():
        one, two = cells(make({"AVX2": head})), cells(make({"AVX2": head, "AMX": head}))
        assert len(one) > 1 and all(any(row) for row in one.values())
        assert sum(map(len, two.values())) >= 1.5 * sum(map(len, one.values())), "a second instruction set has columns or rows"


def test_the_table_of_readme_marks_the_fastest_and_names_the_peers_that_are_missing(measure: ModuleType) -> None:
    text = measure.tables.readme_linear({"AVX2": recorded("linear")})
    table = cells(text)
    assert table[""] == ["AVX2, M=1", "M=4", "M=32", "M=512"]
    assert "torch int4pack, bfloat16 activations" in table and not any("llama" in name for name in table)
    assert text.endswith("Not here: llama.cpp Q4_0, llama.cpp Q8_0.")
    for column in range(4):
        times = {row[column]: float(re.search(r"[\d.]+", row[column])[0]) for name, row in table.items() if name}
        fastest = [text for text in times if text.startswith("**")]
        assert len(fastest) == 1 and times[fastest[0]] == min(times.values())
        assert all(text.strip("*").endswith(" ms") for text in times)


def test_a_candidate_that_one_instruction_set_has_keeps_an_empty_cell_in_the_other(measure: ModuleType) -> None:
    less = recorded("linear")
    less["results"] = [row for row in less["results"] if row["candidate"] != "torch dynamic quantized"]
    table = cells(measure.tables.readme_linear({"AVX2": less, "AVX-512": recorded("linear")}))
    assert table["torch dynamic quantized"][:4] == [""] * 4 and all(table["torch dynamic quantized"][4:])


def test_the_source_says_machine_commit_and_date(measure: ModuleType) -> None:
    head = recorded("linear")
    told = measure.tables.source({"AVX2": head})
    assert f"{head['date'][:10]} at commit {head['commit']} on 2 threads of AMD EPYC (Zen 3), torch 2.13.0" in told
    assert "other processes took" in told and "LOWBIT_ISA" not in told
    intel = copy.deepcopy(head)
    intel["machine"] |= {"cpu": "Intel(R) Xeon(R)", "family_model_stepping": ["6", "143", "8"]}
    told = measure.tables.source({"AVX2": head, "AMX": intel})
    assert "Intel(R) Xeon(R) (Sapphire Rapids)" in told and "limited to AVX2 by benchmarks/measure.py" in told


def test_a_table_is_written_between_its_marks(measure: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# a\n\n<!-- measured: x -->\nold\n<!-- /measured -->\n\n<!-- measured: y -->\n\nkept\n\n<!-- /measured -->\n")
    measure.write(page, "x", "| new |")
    written = page.read_text()
    assert "old" not in written and "<!-- measured: x -->\n\n| new |\n\n<!-- /measured -->" in written and "\nkept\n" in written
    measure.write(page, "x", "| newer |")
    assert page.read_text() == written.replace("new", "newer")
    with pytest.raises(ValueError, match="must have one table between <!-- measured: z -->"):
        measure.write(page, "z", "")


def test_every_table_has_its_marks_in_its_page(measure: ModuleType) -> None:
    for benchmark in measure.BENCHMARKS.values():
        for page, mark in benchmark.tables:
            table = re.findall(f"<!-- measured: {mark} -->\n(.*?)\n<!-- /measured -->", (ROOT / page).read_text(), re.DOTALL)
            assert len(table) == 1 and re.search(r"Measured \d{4}-\d\d-\d\d at commit [0-9a-f]{7}", table[0]), page


def test_the_picture_of_readme_is_drawn_of_the_same_figures(measure: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measure.picture.draw({"AVX2": recorded("linear")}, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
