# SPDX-License-Identifier: Apache-2.0
"""save_pretrained of transformers writes a quantized model as it is, and lowbit.load brings it back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowbit

transformers = pytest.importorskip("transformers")

LLAMA = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)),
    "tied": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=2, n_head=4),
    ),
}


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    cls, config = MODELS[request.param]
    torch.manual_seed(0)
    model = cls(config).eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight())
    ids = torch.randint(0, 97, (1, 7))
    with torch.no_grad():
        return lambda: cls(config).eval(), model, ids, model(ids).logits, tmp_path


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_saved_model_comes_back_bit_for_bit(saved, device: str, shard: str) -> None:
    build, model, ids, wanted, folder = saved
    model.save_pretrained(folder, max_shard_size=shard)
    assert (len(list(Path(folder).glob("*.safetensors"))) > 1) == (shard == "20KB")
    with torch.device(device):
        fresh = build()
    assert set(lowbit.load(fresh, folder)) == {
        name for name, module in model.named_modules() if isinstance(module, lowbit.QuantLinear)
    }
    assert not [name for name, tensor in (*fresh.named_buffers(), *fresh.named_parameters()) if tensor.is_meta]
    with torch.no_grad():
        assert torch.equal(fresh(ids).logits, wanted)


def test_from_pretrained_does_not_take_packed_weights_for_float_ones(saved) -> None:
    build, model, ids, wanted, folder = saved
    model.save_pretrained(folder)
    with pytest.raises((RuntimeError, ValueError)):
        type(model).from_pretrained(folder)
