# SPDX-License-Identifier: Apache-2.0
"""Logits of small random files beside llama.cpp's, for every architecture and scaling, at positions 0, 4000 and 20000.

llama-cpp-python is compiled for minutes, so it is no part of ".[test]": LOWBIT_LLAMA_PYTHON names an interpreter that
has it. `test_gguf_metadata.py` holds the angles without it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import CONFIGS, gguf, write
from test_gguf_metadata import both, divisors_of_llama3, every_second, frequencies, linear, longrope, yarn

from lowbit.huggingface.load_gguf import load_model

SCRIPT = """
import ctypes, sys
import llama_cpp as c, numpy as np

path, tokens, positions, out = sys.argv[1], np.load(sys.argv[2]), [int(at) for at in sys.argv[3].split(",")], sys.argv[4]
c.llama_backend_init()
model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
assert model, path
params = c.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch = len(tokens), 512, 512
params.n_threads = params.n_threads_batch = 1
params.type_k = params.type_v = 0  # float32
params.flash_attn_type, params.swa_full = 0, True
context = c.llama_init_from_model(model, params)
batch, logits = c.llama_batch_init(512, 0, 1), []
for begin in range(0, len(tokens), 512):
    part = tokens[begin : begin + 512]
    batch.n_tokens = len(part)
    for i, token in enumerate(part):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = int(token), begin + i, 1, 0
        batch.logits[i] = begin + i in positions
    assert c.llama_decode(context, batch) == 0
    words = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    logits += [np.ctypeslib.as_array(c.llama_get_logits_ith(context, at - begin), (words,)).copy() for at in positions if begin <= at < begin + 512]
np.save(out, logits)
"""


def nothing(writer: gguf.GGUFWriter) -> None:
    """No other keys."""


POSITIONS = (0, 4000, 20000)
SCALINGS = {"none": lambda writer: writer.add_rope_freq_base(30000.0), "linear": linear, "yarn": yarn, "longrope": longrope, "divisors": frequencies, "llama 3": lambda writer: writer.add_tensor("rope_freqs.weight", divisors_of_llama3(8.0, 10000.0))}
CASES = [(name, "none") for name in CONFIGS if name not in ("tied", "gpt2")]
CASES += [(name, scaling) for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "starcoder2", "stablelm", "nemotron") for scaling in ("linear", "yarn")]
CASES += [("llama", "llama 3"), ("llama", "divisors"), ("llama", "longrope"), ("phi3", "linear"), ("phi3", "longrope"), ("gpt2", "none")]


def small(name: str):
    """One head of 64 columns, two layers; scores whose softmax is neither flat nor one word."""
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=20480, pad_token_id=0)
    if name == "gpt2":
        return type(CONFIGS[name])(vocab_size=64, n_embd=64, n_layer=2, n_head=1, n_positions=20480)
    return type(CONFIGS[name])(**sizes, **({} if name in ("phi3", "starcoder2", "stablelm") else dict(head_dim=64)))


def by_llama_cpp(path: Path, tokens: np.ndarray, positions: tuple[int, ...]) -> torch.Tensor:
    """llama.cpp's logits at these positions."""
    interpreter = os.environ.get("LOWBIT_LLAMA_PYTHON")
    if interpreter is None:
        pytest.skip("pip install llama-cpp-python (LOWBIT_LLAMA_PYTHON names an interpreter that has it)")
    files = [path.with_name(name) for name in ("script.py", "tokens.npy", "logits.npy")]
    files[0].write_text(SCRIPT), np.save(files[1], tokens)
    subprocess.run([interpreter, files[0], path, files[1], ",".join(map(str, positions)), files[2]], check=True, capture_output=True)
    return torch.from_numpy(np.load(files[2]))


def off_by(path: Path, tokens: np.ndarray, positions: tuple[int, ...]) -> list[float]:
    """The differences of our logits and llama.cpp's, as parts of the latter's norm."""
    wanted = by_llama_cpp(path, tokens, positions)
    model = load_model(path, activations="float")
    with torch.no_grad():
        ours = model.lm_head(model.base_model(torch.from_numpy(tokens)[None]).last_hidden_state[0, list(positions)])
        if cap := getattr(model.config, "final_logit_softcapping", None):
            ours = cap * torch.tanh(ours / cap)
    return ((ours - wanted).norm(dim=1) / wanted.norm(dim=1)).tolist()


@pytest.mark.parametrize(("name", "scaling"), CASES)
def test_logits_are_those_of_llama_cpp(name, scaling, tmp_path):
    more = both(SCALINGS[scaling], every_second) if name == "gemma3" else SCALINGS[scaling]
    more = nothing if name == "gpt2" else more
    path = write(tmp_path / "model.gguf", name, "F32", config=small(name), words=True, more=more, spread=0.2)
    off = off_by(path, np.random.default_rng(0).integers(0, 64, 20001), POSITIONS)
    print(f"\n{name}, {scaling}: " + ", ".join(f"{value:.1e}" for value in off))
    assert max(off) < 2e-3  # without its key the least of these scalings is off by 0.04 at position 4000


HEADS = dict(vocab_size=64, hidden_size=128, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096, pad_token_id=0)
VARIANTS = {
    "llama": ("llama", dict(head_dim=64), nothing),
    "llama with biases": ("llama", dict(head_dim=64, attention_bias=True, mlp_bias=True), nothing),
    "qwen3 with narrow heads": ("qwen3", dict(head_dim=32), nothing),
    "gemma2 with a window": ("gemma2", dict(head_dim=32, sliding_window=100), nothing),
    "gemma2 with caps": ("gemma2", dict(head_dim=32), lambda writer: (writer.add_final_logit_softcapping(5.0), writer.add_attn_logit_softcapping(3.0))),
    "gemma3 with a window": ("gemma3", dict(head_dim=32, sliding_window=100), every_second),
    "gemma3 without a window": ("gemma3", dict(head_dim=32, sliding_window=None), nothing),
    "gemma3 with a cap": ("gemma3", dict(head_dim=32), lambda writer: writer.add_final_logit_softcapping(5.0)),
    "stablelm with biases": ("stablelm", dict(use_qkv_bias=True), nothing),
    "stablelm in parallel": ("stablelm", dict(use_parallel_residual=True), nothing),
    "stablelm, 32 columns rotated": ("stablelm", {}, lambda writer: writer.add_rope_dimension_count(32)),
    "phi3, 48 columns rotated": ("phi3", {}, lambda writer: writer.add_rope_dimension_count(48)),
    "phi3, a short text of longrope": ("phi3", {}, longrope),
    "nemotron, 24 columns rotated": ("nemotron", dict(head_dim=64), lambda writer: writer.add_rope_dimension_count(24)),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_architectures(variant, tmp_path):
    name, options, more = VARIANTS[variant]
    path = write(tmp_path / "model.gguf", name, "F32", config=type(CONFIGS[name])(**HEADS, **options), words=True, more=more, spread=0.12)
    off = off_by(path, np.random.default_rng(0).integers(0, 64, 1500), (0, 99, 100, 300, 1499))
    print(f"\n{variant}: " + ", ".join(f"{value:.1e}" for value in off))
    assert max(off) < 1e-3
