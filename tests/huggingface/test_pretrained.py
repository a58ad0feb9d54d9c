# SPDX-License-Identifier: Apache-2.0
"""save_pretrained of transformers writes a quantized model as it is, and lowbit.load brings it back."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tiny_models import MODELS

import lowbit


@pytest.fixture(params=["llama", "tied", "gpt2"])
def saved(request, tmp_path):
    cls, config = MODELS[request.param]
    torch.manual_seed(0)
    model = cls(copy.deepcopy(config)).eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight())
    ids = torch.randint(0, 97, (1, 7))
    with torch.no_grad():
        return lambda: cls(copy.deepcopy(config)).eval(), model, ids, model(ids).logits, tmp_path


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_saved_model_comes_back_bit_for_bit(saved, device: str, shard: str) -> None:
    build, model, ids, wanted, folder = saved
    model.save_pretrained(folder, max_shard_size=shard)
    assert (len(list(Path(folder).glob("*.safetensors"))) > 1) == (shard == "20KB")
    with torch.device(device):
        fresh = build()
    assert set(lowbit.load(fresh, folder)) == {
        name for name, module in model.named_modules() if isinstance(module, (lowbit.QuantLinear, lowbit.QuantEmbedding))
    }
    assert not [name for name, tensor in (*fresh.named_buffers(), *fresh.named_parameters()) if tensor.is_meta]
    with torch.no_grad():
        assert torch.equal(fresh(ids).logits, wanted)
