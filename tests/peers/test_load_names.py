# SPDX-License-Identifier: Apache-2.0
"""lowbit.load reads files whose names are older than the model's, as from_pretrained of transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import lowbit

transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)


def neox(seed: int = 0, **more: Any) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, **more)).eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(2, 12)[None]).logits


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_head_of_gpt_neox(device: str, tied: bool, tmp_path: Path) -> None:
    model = neox(tie_word_embeddings=tied)
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    model.save_pretrained(tmp_path)
    assert ("embed_out.weight" in names_in(tmp_path)) is not tied  # as transformers writes it
    with torch.device(device):
        fresh = neox(1, tie_word_embeddings=tied)
    turned = lowbit.load(fresh, tmp_path)
    assert "lm_head" in turned and torch.equal(logits(fresh), logits(model))
    assert (fresh.lm_head.weight is fresh.gpt_neox.embed_in.weight) is tied


def test_a_folder_of_quantize_checkpoint(tmp_path: Path) -> None:
    neox().save_pretrained(tmp_path / "float")
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", "int4_weight_only(group_size=32)")
    assert "embed_out.weight" in names_in(tmp_path / "packed")
    fresh, wanted = neox(1), transformers.GPTNeoXForCausalLM.from_pretrained(tmp_path / "packed").eval()
    lowbit.load(fresh, tmp_path / "packed")
    assert torch.equal(logits(fresh), logits(wanted))


def test_a_state_dict_with_names_of_nothing_is_still_refused() -> None:
    model = neox()
    state = {name.replace("lm_head", "embed_somewhere"): tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"missing lm_head.weight, unexpected embed_somewhere.weight"):
        lowbit.load(neox(1), state)
