# SPDX-License-Identifier: Apache-2.0
"""Logits that llama.cpp computes for a GGUF file, in a process of its own, and how far ours are from them.

llama-cpp-python is compiled for minutes, so it is no part of ".[test]": LOWBIT_LLAMA_PYTHON names an interpreter that
has it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

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
adapters = [c.llama_adapter_lora_init(model, name.encode()) for name in sys.argv[5::2]]
assert all(adapters), sys.argv[5::2]
scales = [float(scale) for scale in sys.argv[6::2]]
given = (c.llama_adapter_lora_p_ctypes * len(adapters))(*adapters), len(adapters), (ctypes.c_float * len(scales))(*scales)
assert c.llama_set_adapters_lora(context, *given) == 0
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


def logits_of_llama_cpp(path: Path, tokens: np.ndarray, positions: Sequence[int], adapters: Sequence[tuple[Path, float]] = ()) -> torch.Tensor:
    """``[positions, words]``, with each LoRA file and the factor of its change."""
    interpreter = os.environ.get("LOWBIT_LLAMA_PYTHON")
    if interpreter is None:
        pytest.skip("pip install llama-cpp-python (LOWBIT_LLAMA_PYTHON names an interpreter that has it)")
    files = [path.with_name(name) for name in ("script.py", "tokens.npy", "logits.npy")]
    files[0].write_text(SCRIPT), np.save(files[1], tokens)
    more = [str(word) for adapter in adapters for word in adapter]
    done = subprocess.run([interpreter, files[0], path, files[1], ",".join(map(str, positions)), files[2], *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.from_numpy(np.load(files[2]))


@torch.no_grad()
def our_logits(model: torch.nn.Module, tokens: np.ndarray, positions: Sequence[int]) -> torch.Tensor:
    """``[positions, words]`` of a model of transformers, which may have adapters of peft."""
    model = model.get_base_model() if hasattr(model, "peft_config") else model
    found = model.lm_head(model.base_model(torch.from_numpy(tokens)[None]).last_hidden_state[0, list(positions)])
    found = found / getattr(model.config, "logits_scaling", 1.0)
    if cap := getattr(model.config, "final_logit_softcapping", None):
        found = cap * torch.tanh(found / cap)
    return found


def distances(ours: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """The differences of each position, as parts of the norm of what is wanted."""
    return ((ours - wanted).norm(dim=1) / wanted.norm(dim=1)).tolist()


def off_by(path: Path, tokens: np.ndarray, positions: Sequence[int], change: Callable[[torch.nn.Module], None] | None = None) -> list[float]:
    """The distances of our logits from llama.cpp's; ``change`` changes our model before."""
    wanted = logits_of_llama_cpp(path, tokens, positions)
    model = load_model(path, activations="float", fuse=change is None)
    if change:
        change(model)
    return distances(our_logits(model, tokens, positions), wanted)
