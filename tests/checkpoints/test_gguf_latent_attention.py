# SPDX-License-Identifier: Apache-2.0
"""deepseek2 in GGUF files: both routers, both forms of kv_b_proj, beside transformers' float models."""

from __future__ import annotations

import copy

import pytest
import torch
from gguf_files import TOKENS, distance, gguf, logits, transformers
from gguf_mixtures import KV_B, LATENT, halves_of_kv_b, in_float, write_mixture

from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.saving import save
from lowbit.huggingface.load_gguf import load_model

NAME = "deepseek2"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.707, "mscale_all_dim": 0.707}
V3, V2 = transformers.DeepseekV3Config, transformers.DeepseekV2Config
CONFIGS = {
    "V3": V3(**LATENT, n_group=2, topk_group=1, norm_topk_prob=True),
    "V3 without norm": V3(**LATENT, n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.8),
    "V3 with YaRN": V3(**LATENT, n_group=3, topk_group=2, rope_parameters=YARN),
    "V3 without a latent query": V3(**LATENT | dict(q_lora_rank=None), n_group=1, topk_group=1),
    "V2 in groups": V2(**LATENT, n_group=3, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
    "V2 Lite": V2(**LATENT | dict(q_lora_rank=None), n_group=1, topk_group=1, topk_method="greedy", rope_parameters=YARN),
    "V2 with experts in all layers": V2(**LATENT | dict(first_k_dense_replace=0), topk_method="greedy"),
}


def changed(case: str, **attributes) -> transformers.PreTrainedConfig:
    config = copy.deepcopy(CONFIGS[case])
    for key, value in attributes.items():
        setattr(config, key, value)
    return config


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("case", CONFIGS)
def test_every_form_computes_what_transformers_does(case, split, tmp_path):
    config = CONFIGS[case]
    path = write_mixture(tmp_path / "model.gguf", NAME, "F32", config=config, split=split)
    wanted = logits(in_float(path, NAME, config))
    for fuse in (False, True):
        assert distance(logits(load_model(path, activations="float", fuse=fuse)), wanted) < 1e-5
    assert type(load_model(path).config) is type(config)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("type", ["Q4_0", "Q5_1", "Q8_0", "IQ4_NL", "F16"])
def test_kv_b_of_every_type(type, split, tmp_path):
    """The codes of kv_b_proj itself are kept; of its two halves, which are float16, so are 11 bits."""
    config = CONFIGS["V3"]
    path = write_mixture(tmp_path / "model.gguf", NAME, type, config=config, split=split)
    model, wanted = load_model(path, activations="float", fuse=False), in_float(path, NAME, config)
    ours = model.model.layers[1].self_attn.kv_b_proj
    assert ours.spec.is_float == (split or type == "F16")
    value = wanted.state_dict()[f"model.layers.1.{KV_B}"]
    bound = value.abs() + value.abs().amax(1, keepdim=True) * (type == "Q5_1")  # whose zero points are rounded
    assert ((ours.dequantize() - value).abs() <= 2**-10 * bound + 2**-24).all()
    assert distance(logits(model), logits(wanted)) < 3e-3


def test_generated_text_is_that_of_transformers(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", NAME, "F32", config=CONFIGS["V3 with YaRN"])
    theirs = in_float(path, NAME, CONFIGS["V3 with YaRN"])
    wanted = theirs.generate(TOKENS, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    ours = load_model(path, activations="float").generate(TOKENS, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert torch.equal(ours, wanted)


def test_scores_grow_with_yarn_as_the_file_says(tmp_path):
    config = CONFIGS["V2 Lite"]
    path = write_mixture(tmp_path / "model.gguf", NAME, "F32", config=config)
    model = load_model(path, activations="float", fuse=False)
    scale = (96 + 32) ** -0.5 * (1 + 0.1 * 0.707 * torch.tensor(40.0).log().item()) ** 2
    assert model.model.layers[0].self_attn.scaling == pytest.approx(scale, rel=1e-6)
    assert model.model.rotary_emb.attention_scaling == 1.0
    without = {key: value for key, value in YARN.items() if not key.startswith("mscale")}
    path = write_mixture(tmp_path / "without.gguf", NAME, "F32", config=changed("V2 Lite", rope_parameters=without))
    model = load_model(path, activations="float", fuse=False)
    assert model.model.layers[0].self_attn.scaling == (96 + 32) ** -0.5
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1 + 0.1 * torch.tensor(40.0).log().item())


@pytest.mark.parametrize(("words", "layers", "sigmoid"), [(154880, 47, True), (154880, 46, False), (64, 47, False)])
def test_a_router_without_a_name_is_that_of_the_model(words, layers, sigmoid, tmp_path):
    """GLM 4.7 Flash, by its numbers of words and layers, scores by sigmoid; DeepSeek V2 by softmax."""
    from lowbit.checkpoints.gguf.config import attributes_of

    file = GgufFile.open(write_mixture(tmp_path / "model.gguf", NAME, "F16", config=CONFIGS["V2 in groups"]))
    file.metadata[f"{NAME}.block_count"] = layers
    table = file.tensors["token_embd.weight"]
    file.tensors["token_embd.weight"] = type(table)(table.name, table.type, (words, 256))
    assert attributes_of(file)[0] == ("deepseek_v3" if sigmoid else "deepseek_v2")


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", NAME, "F32", config=CONFIGS["V3"], more=lambda writer: writer.add_nextn_predict_layers(1))
    model = load_model(path, activations="float")
    assert distance(logits(model), logits(in_float(path, NAME, changed("V3", num_hidden_layers=2)))) < 1e-5


# ---- files that are refused ----------------------------------------------------------------------------------------

WRONG = {
    "attention.key_length": (128, "96 .a latent vector and a rotated key., got 128"),
    "attention.value_length": (128, "64 .a latent vector., got 128"),
    "attention.head_count_kv": (2, "1 or 4 .all heads share the latent vectors., got 2"),
    "attention.key_length_mla": (32, "more than the 32 rotated columns, got 32"),
    "expert_gating_func": (3, "2 or 0"),
    "expert_group_count": (4, "a divisor of the number of experts, got 4"),
    "leading_dense_block_count": (4, "0 to 3, the number of layers, got 4"),
    "rope.scaling.type": ("linear", "yarn where yarn_log_multiplier is not 0, got 'linear'"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_key_that_the_model_cannot_follow_is_refused_by_name(key, tmp_path):
    value, message = WRONG[key]
    path = write_mixture(
        tmp_path / "model.gguf", NAME, "F16", config=changed("V3 with YaRN", rope_parameters=YARN | {"mscale_all_dim": 1.0}),
        more=lambda writer: (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{NAME}.{key}", value),
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"model.gguf: {NAME}.{key} must be {message}"):
        load_model(path)


def test_a_softmax_whose_weights_add_up_to_1_is_refused(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", NAME, "F16", config=CONFIGS["V2 in groups"], more=lambda writer: writer.add_expert_weights_norm(True))
    with pytest.raises(ValueError, match="deepseek2.expert_weights_norm must be False .the model leaves no choice., got True"):
        load_model(path)


HALVES = {
    "without values": (lambda shapes: shapes.pop("blk.1.attn_v_b.weight"), "the file must hold blk.1.attn_v_b.weight too, got none"),
    "without keys": (lambda shapes: shapes.pop("blk.1.attn_k_b.weight"), "the file must hold blk.1.attn_k_b.weight too, got none"),
    "not transposed": (lambda shapes: shapes.update({"blk.1.attn_k_b.weight": (4, 96, 64)}), r"the shape of blk.1.attn_k_b.weight must be \[4, 64, 96\], got \[4, 96, 64\]"),
    "both forms": (lambda shapes: shapes.update({"blk.1.attn_kv_b.weight": (640, 64)}), "every tensor must belong to .* got blk.1.attn_kv_b.weight"),
    "a bias": (lambda shapes: shapes.update({"blk.1.attn_q_a.bias": (96,)}), "every tensor must belong to .* got blk.1.attn_q_a.bias"),
}  # fmt: skip


@pytest.mark.parametrize("what", HALVES)
def test_what_a_file_lacks_is_named(what, tmp_path):
    change, message = HALVES[what]
    path = write_mixture(tmp_path / "model.gguf", NAME, config=CONFIGS["V3"], change=change)
    with pytest.raises(ValueError, match=f"model.gguf: .*{message}"):
        load_model(path)


def test_values_beyond_float16_are_refused_by_name(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", NAME, "Q8_0", config=CONFIGS["V3"])
    data = bytearray(path.read_bytes())
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.attn_v_b.weight")
    data[tensor.data_offset : tensor.data_offset + 3] = b"\xff\x7b\x7f"  # 65504 * 127
    path.write_bytes(data)
    with pytest.raises(ValueError, match="blk.1.attn_k_b.weight .Q8_0. cannot be .*kv_b_proj.weight: the values must be finite as torch.float16"):
        load_model(path)


# ---- saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("type", ["F32", "F16", "Q4_0"])
def test_a_saved_file_is_the_one_that_it_was_read_from(type, split, tmp_path):
    """Of the halves of blocks, which are float16 then, the values."""
    path = write_mixture(tmp_path / "model.gguf", NAME, type, config=CONFIGS["V3"], split=split)
    save(load_model(path, fuse=False), tmp_path / "copy.gguf", like=path)
    ours, theirs = GgufFile.open(tmp_path / "copy.gguf"), GgufFile.open(path)
    assert ours.metadata == theirs.metadata and ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        halved = type == "Q4_0" and key.endswith(("attn_k_b.weight", "attn_v_b.weight"))
        assert (ours.tensors[key].type, ours.tensors[key].shape) == ("F16" if halved else tensor.type, tensor.shape), key
        assert halved or bytes(ours.tensors[key].data) == bytes(tensor.data), key
    assert torch.equal(logits(load_model(tmp_path / "copy.gguf")), logits(load_model(path)))


def test_packed_halves_are_saved_without_rounding(tmp_path):
    import lowbit

    path = write_mixture(tmp_path / "model.gguf", NAME, "F16", config=CONFIGS["V3"])
    model = load_model(path, activations="float", fuse=False)
    lowbit.dequantize_(model)
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    save(model, tmp_path / "packed.gguf", like=path)
    read = {tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in gguf.GGUFReader(tmp_path / "packed.gguf").tensors}
    layer = model.model.layers[1].self_attn.kv_b_proj
    for name, half in halves_of_kv_b(CONFIGS["V3"], layer.dequantize()).items():
        assert torch.equal(read[f"blk.1.{name}"], half), name
