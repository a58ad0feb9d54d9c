# SPDX-License-Identifier: Apache-2.0
"""Caches of hybrids in files: saved and loaded with the same bits, and what is refused."""

from __future__ import annotations

import pytest
import torch
from croppable_hybrids import CONFIGS, PROMPT, fused, logits
from gguf_files import transformers

import lowbit
from lowbit.models.croppable_states import CroppableStates
from lowbit.models.growing_cache import GrowingLayer


@pytest.mark.parametrize("name, state_dtype", [*((name, torch.float32) for name in CONFIGS), ("Mamba-2", torch.bfloat16)])
def test_a_loaded_cache_has_the_same_bits(name, state_dtype, tmp_path):
    model = fused(name)
    cache = lowbit.croppable_cache(model, every=16, state_dtype=state_dtype)
    logits(model, PROMPT, cache)
    for token in range(9):
        logits(model, torch.tensor([[token + 5]]), cache)
    lowbit.save_cache(cache, tmp_path / "prompt.safetensors")
    loaded = lowbit.load_cache(model, tmp_path / "prompt.safetensors")
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        assert type(ours) is type(theirs)
        if isinstance(theirs, GrowingLayer):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        if not isinstance(theirs, CroppableStates):
            continue
        assert ours.length == theirs.length and ours.every == 16 and ours.state_dtype is state_dtype
        assert ours.states().keys() == theirs.states().keys() >= {16, 32, 45}
        assert all(a.dtype is b.dtype and torch.equal(a, b) for at, states in ours.states().items() for a, b in zip(states, theirs.states()[at], strict=True))
    more = torch.arange(5, 12)[None]
    assert torch.equal(logits(model, more, cache), logits(model, more, loaded))
    assert lowbit.rewind_cache(loaded, 40) in (32, 36)


def test_other_caches_and_files_are_refused(tmp_path):
    model = fused("short convolution")
    with pytest.raises(ValueError, match="save_cache: cache must be one of lowbit.croppable_cache, got a DynamicCache"):
        lowbit.save_cache(transformers.DynamicCache(config=model.config), tmp_path / "file")
    cache = lowbit.croppable_cache(model)
    with pytest.raises(ValueError, match="save_cache: cache must have tokens, got an empty one"):
        lowbit.save_cache(cache, tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="load_cache: path must be a file"):
        lowbit.load_cache(model, tmp_path / "file")
    (tmp_path / "file").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="load_cache: .*file must be a safetensors file"):
        lowbit.load_cache(model, tmp_path / "file")
    logits(model, PROMPT, cache)
    lowbit.save_cache(cache, tmp_path / "file")
    with pytest.raises(ValueError, match="load_cache: .*file must be of a model with the layers"):
        lowbit.load_cache(fused("Mamba-2"), tmp_path / "file")
