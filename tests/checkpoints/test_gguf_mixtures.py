# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in GGUF files, beside transformers' float models of the tensors that the gguf package decodes."""

from __future__ import annotations

import copy

import pytest
import torch
from gguf_files import HALVES, distance, gguf, logits, transformers
from gguf_hybrids import CONFIGS as HYBRIDS
from gguf_hybrids import architecture_of
from gguf_mixtures import CONFIGS, experts_of, in_float, write_mixture
from gguf_qwen35 import CONFIGS as OF_QWEN35

import lowbit
from lowbit.__main__ import main
from lowbit.checkpoints.gguf.config import attributes_of
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.mixtures import DENSE, MIXTURES
from lowbit.checkpoints.gguf.saving import save
from lowbit.huggingface.load_gguf import load_model

TYPES = [*HALVES, "F32", "F16"]


def changed(name: str, **attributes) -> transformers.PreTrainedConfig:
    config = copy.deepcopy(CONFIGS[name])
    for key, value in attributes.items():
        setattr(config, key, value)
    return config


def test_every_architecture_with_experts_has_its_case():
    assert MIXTURES.keys() | DENSE.keys() >= set(map(architecture_of, HYBRIDS))
    hybrids = set(map(architecture_of, HYBRIDS)) & MIXTURES.keys()
    assert MIXTURES.keys() == CONFIGS.keys() | OF_QWEN35.keys() - {"qwen35"} | hybrids


@pytest.mark.parametrize("type", ["Q4_0", "F32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixture_computes_what_transformers_does(name, type, tmp_path):
    path = write_mixture(tmp_path / "model.gguf", name, type, split=False)
    wanted = logits(in_float(path, name))
    for fuse in (False, True):
        model = load_model(path, activations="float", fuse=fuse)
        assert distance(logits(model), wanted) < 1e-5
    assert sum(isinstance(module, lowbit.QuantExperts) for module in model.modules()) == 2
    assert distance(logits(load_model(path)), wanted) < 0.3


def test_gpt_oss_with_experts_in_mxfp4(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", "gpt-oss", "Q8_0", experts="MXFP4")
    wanted = logits(in_float(path, "gpt-oss"))
    for activations, worst, name in (("float", 1e-5, "fp4_e2m1 g32"), ("int8", 0.3, "fp4_e2m1 g32 int8-activations")):
        model = load_model(path, activations=activations)
        assert distance(logits(model), wanted) < worst
        assert {stored.spec.name for stored in experts_of(model, 1).stored.values()} == {name}


@pytest.mark.parametrize("type", TYPES)
def test_experts_of_every_type(type, tmp_path):
    path = write_mixture(tmp_path / "model.gguf", "qwen3moe", "Q8_0", experts=type)
    wanted = logits(in_float(path, "qwen3moe"))
    assert distance(logits(load_model(path, activations="float")), wanted) < 5e-3
    assert distance(logits(load_model(path)), wanted) < 0.3


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_codes_are_those_of_the_file_and_gate_comes_before_up(name, tmp_path):
    """Also in gpt-oss, whose float weight has them in turns."""
    path = write_mixture(tmp_path / "model.gguf", name, experts="Q4_0")
    experts = experts_of(load_model(path, fuse=False), 1)
    read = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    first, down = (torch.cat([torch.tensor(read[f"blk.1.ffn_{part}_exps.weight"]) for part in parts], 1) for parts in (("gate", "up"), ("down",)))
    assert torch.equal(experts.dequantize("gate_up_proj"), first)
    assert torch.equal(experts.dequantize("down_proj"), down)


def test_down_may_have_another_type_than_gate_and_up(tmp_path):
    types = {f"blk.{layer}.ffn_down_exps.weight": "Q6_K" for layer in range(2)}
    path = write_mixture(tmp_path / "model.gguf", "qwen3moe", "Q4_K", types=types)
    model = load_model(path, activations="float")
    assert distance(logits(model), logits(in_float(path, "qwen3moe"))) < 5e-3


def test_a_file_may_have_gate_and_up_in_one_tensor(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", "qwen3moe", merged=True)
    assert distance(logits(load_model(path, activations="float")), logits(in_float(path, "qwen3moe"))) < 1e-5


def test_the_rows_of_a_gate_need_not_fill_panels(tmp_path):
    """A panel of 16 rows has the last of the gate and the first of up."""
    config = changed("qwen3moe", moe_intermediate_size=40)
    types = {f"blk.{layer}.ffn_down_exps.weight": "F16" for layer in range(2)}  # 40 columns are not whole blocks
    path = write_mixture(tmp_path / "model.gguf", "qwen3moe", config=config, types=types)
    assert distance(logits(load_model(path, activations="float")), logits(in_float(path, "qwen3moe", config))) < 1e-5


# ---- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["qwen2moe", "qwen3moe", "olmoe", "glm4moe"])
def test_weights_of_chosen_experts_add_up_to_1_if_the_file_says_so(name, norm, tmp_path):
    config = changed(name, norm_topk_prob=norm)
    path = write_mixture(tmp_path / "model.gguf", name, config=config, more=lambda writer: writer.add_expert_weights_norm(norm))
    model = load_model(path, activations="float")
    assert distance(logits(model), logits(in_float(path, name, config))) < 1e-5
    assert distance(logits(model), logits(in_float(path, name, changed(name, norm_topk_prob=not norm)))) > 1e-3


def test_olmoe_clips_if_the_file_says_so(tmp_path):
    config = changed("olmoe", clip_qkv=0.5)
    path = write_mixture(tmp_path / "model.gguf", "olmoe", config=config, more=lambda writer: writer.add_clamp_kqv(0.5))
    model = load_model(path, activations="float")
    assert distance(logits(model), logits(in_float(path, "olmoe", config))) < 1e-5


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", "glm4moe", more=lambda writer: writer.add_nextn_predict_layers(1))
    model = load_model(path, activations="float", fuse=False)
    assert len(model.model.layers) == 2
    assert distance(logits(model), logits(in_float(path, "glm4moe", changed("glm4moe", num_hidden_layers=2)))) < 1e-5
    with pytest.raises(ValueError, match="like must have no layers that predict further tokens, got blk.2."):
        save(model, tmp_path / "copy.gguf", like=path)


WRONG = {
    "qwen3moe.expert_used_count": (6, "1 to 5, the number of experts, got 6"),
    "qwen3moe.expert_count": (0, "5, as many as blk.0.ffn_gate_inp.weight has, got 0"),
    "qwen3moe.expert_feed_forward_length": (128, "256, as many as blk.0.ffn_down_exps.weight has, got 128"),
    "qwen2moe.expert_shared_feed_forward_length": (256, "512, as many as blk.0.ffn_down_shexp.weight has, got 256"),
    "qwen3moe.expert_gating_func": (2, r"1 or 0 \(the router of this model scores in one way\), got 2"),
    "minimax-m2.expert_gating_func": (1, "2 or 0"),
    "llama.expert_weights_norm": (False, r"True \(the model leaves no choice\), got False"),
    "qwen3moe.expert_weights_scale": (2.5, r"0.0 or 1.0 \(the model has no such factor\), got 2.5"),
    "qwen3moe.expert_shared_count": (1, "0"),
    "qwen3moe.expert_group_count": (2, r"0 or 1 \(the model has no groups of experts\), got 2"),
    "qwen3moe.leading_dense_block_count": (1, r"0 \(every layer of this model has experts\), got 1"),
    "glm4moe.expert_group_count": (4, "a divisor of the number of experts, got 4"),
    "glm4moe.expert_group_used_count": (3, "1 to 2, the number of groups, got 3"),
    "glm4moe.leading_dense_block_count": (4, "0 to 3, the number of layers, got 4"),
    "glm4moe.nextn_predict_layers": (3, "0 to 2, of 3 layers, got 3"),
    "qwen3moe.attention.sliding_window": (16, "0 or the context length"),
    "granitemoe.logit_scale": (-1.0, "a number above 0, got -1.0"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_key_that_the_model_cannot_follow_is_refused_by_name(key, tmp_path):
    value, message = WRONG[key]

    def more(writer: gguf.GGUFWriter) -> None:
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)

    path = write_mixture(tmp_path / "model.gguf", key.partition(".")[0], more=more)
    with pytest.raises(ValueError, match=f"model.gguf: {key} must be {message}"):
        load_model(path)


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count"])
def test_a_key_that_every_mixture_has_is_missed_by_name(key, tmp_path):
    file = GgufFile.open(write_mixture(tmp_path / "model.gguf", "olmoe"))
    del file.metadata[f"olmoe.{key}"]
    with pytest.raises(ValueError, match=f"model.gguf: olmoe.{key} must be in the metadata, got none"):
        attributes_of(file)


def test_a_key_that_nothing_reads_is_refused_by_name(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", "qwen3moe", more=lambda writer: writer.add_moe_every_n_layers(2))
    with pytest.raises(ValueError, match="got qwen3moe.moe_every_n_layers"):
        load_model(path)


@pytest.mark.parametrize("name", ["dbrx"])
def test_other_mixtures_are_refused_by_name(name, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.add_expert_count(8)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    with pytest.raises(ValueError, match=f"general.architecture must be one of .*qwen3moe.* got {name!r}"):
        load_model(tmp_path / "model.gguf")


# ---- tensors -------------------------------------------------------------------------------------------------------


def lacking(name: str):
    return lambda shapes: shapes.pop(name) and None


def with_shape(name: str, shape: tuple[int, ...]):
    return lambda shapes: shapes.update({name: shape})


DAMAGED = {
    "an expert": (with_shape("blk.1.ffn_gate_exps.weight", (4, 256, 256)), r"blk.1.ffn_gate_exps.weight must be \[5, 256, 256\], got \[4, 256, 256\]"),
    "an expert of down": (with_shape("blk.1.ffn_down_exps.weight", (4, 256, 256)), r"blk.1.ffn_down_exps.weight must be \[5, 256, 256\], got \[4, 256, 256\]"),
    "rows of up": (with_shape("blk.0.ffn_up_exps.weight", (5, 128, 256)), r"blk.0.ffn_up_exps.weight must be \[5, 256, 256\], got \[5, 128, 256\]"),
    "up": (lacking("blk.1.ffn_up_exps.weight"), "the file must hold blk.1.ffn_up_exps.weight too, got none"),
    "gate": (lacking("blk.1.ffn_gate_exps.weight"), "the file must hold blk.1.ffn_gate_exps.weight too, got none"),
    "down": (lacking("blk.1.ffn_down_exps.weight"), "got none for model.layers.1.mlp.experts.down_proj"),
    "a router": (lacking("blk.1.ffn_gate_inp.weight"), "got none for model.layers.1.mlp.gate.weight"),
    "nothing": (with_shape("blk.1.ffn_gate_shexp.weight", (256, 256)), "every tensor must belong to .* got blk.1.ffn_gate_shexp.weight"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_what_a_file_lacks_is_named(what, tmp_path):
    change, message = DAMAGED[what]
    path = write_mixture(tmp_path / "model.gguf", "qwen3moe", change=change)
    with pytest.raises(ValueError, match=f"model.gguf: .*{message}"):
        load_model(path)


def test_gate_and_up_must_have_one_type(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", "qwen3moe", types={"blk.0.ffn_up_exps.weight": "Q8_0"})
    with pytest.raises(ValueError, match="blk.0.ffn_gate_exps.weight .Q4_0. .* blk.0.ffn_up_exps.weight must have the same type, got Q8_0"):
        load_model(path)


def test_a_router_is_never_packed(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", "qwen3moe")
    file = GgufFile.open(path)
    object.__setattr__(file.tensors["blk.0.ffn_gate_inp.weight"], "type", "Q8_0")
    from lowbit.checkpoints.gguf.config import config_of
    from lowbit.checkpoints.gguf.weights import StateReader

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(file))
    with pytest.raises(ValueError, match="blk.0.ffn_gate_inp.weight .Q8_0. cannot be model.layers.0.mlp.gate.weight: packed weights belong"):
        StateReader(file, model, "int8").read()


# ---- other ways in and out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2moe", "qwen3moe", "minimax-m2"])
def test_from_pretrained_reads_the_same_and_saves_what_it_read(name, tmp_path):
    path = write_mixture(tmp_path / "model.gguf", name, "Q4_1")
    config = lowbit.LowbitConfig("gguf", activations="float")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, quantization_config=config, attn_implementation="lowbit")
    wanted = logits(load_model(path, activations="float", fuse=False))
    assert distance(logits(model.eval()), wanted) < 1e-6
    model.save_pretrained(tmp_path / "packed")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="lowbit")
    assert torch.equal(logits(again.eval()), logits(model))


@pytest.mark.parametrize(("name", "type"), [*((name, "Q4_0") for name in CONFIGS), ("qwen3moe", "Q5_0"), ("gpt-oss", "MXFP4"), ("gpt-oss", "F16")])
def test_a_saved_mixture_is_the_file_that_it_was_read_from(name, type, tmp_path):
    path = write_mixture(tmp_path / "model.gguf", name, "Q8_0", experts=type, split=False)
    save(load_model(path, fuse=False), tmp_path / "copy.gguf", like=path)
    ours, theirs = GgufFile.open(tmp_path / "copy.gguf"), GgufFile.open(path)
    assert ours.metadata == theirs.metadata and ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        assert (ours.tensors[key].type, ours.tensors[key].shape) == (tensor.type, tensor.shape), key
        assert bytes(ours.tensors[key].data) == bytes(tensor.data), key


def test_saved_minimums_are_read_again_as_they_were(tmp_path):
    model = load_model(write_mixture(tmp_path / "model.gguf", "qwen3moe", "Q4_1"), fuse=False)
    save(model, tmp_path / "copy.gguf", like=tmp_path / "model.gguf")
    again = load_model(tmp_path / "copy.gguf", fuse=False)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_file_is_quantized_in_a_terminal(tmp_path):
    path = write_mixture(tmp_path / "model.gguf", "qwen2moe", "F16")
    main(["quantize", str(path), str(tmp_path / "small.gguf"), "--config", "int4_weight_only(group_size=32)"])
    tensors = GgufFile.open(tmp_path / "small.gguf").tensors
    assert {tensors[f"blk.0.ffn_{part}_exps.weight"].type for part in ("gate", "up", "down")} == {"Q4_0"}
    assert tensors["blk.0.ffn_gate_inp.weight"].type == "F32"
    wanted = logits(in_float(tmp_path / "small.gguf", "qwen2moe"))
    assert distance(logits(load_model(tmp_path / "small.gguf", activations="float")), wanted) < 1e-5
