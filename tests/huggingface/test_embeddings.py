# SPDX-License-Identifier: Apache-2.0
"""LowbitConfig(embeddings=...) and `lowbit quantize --embeddings`: tables are packed where it is asked for, with the heads tied to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import MODELS, logits, save
from torch import nn

import lowbit
from lowbit.__main__ import main

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

W4A8, INT8, INT4 = lowbit.int8_dynamic_activation_int4_weight(), lowbit.int8_weight_only(), lowbit.int4_weight_only(32)
LAYERS = (lowbit.QuantLinear, lowbit.QuantEmbedding)


def formats(model: nn.Module) -> dict[str, str]:
    return {name: module.spec.name for name, module in model.named_modules() if isinstance(module, LAYERS)}


def notes(model: nn.Module) -> dict[str, str]:
    return {row.layer: row.note for row in model.hf_quantizer.report.rows}


@pytest.mark.parametrize("embeddings", [INT8, INT4, lowbit.intx_weight_only(torch.int6, 32), lowbit.nf4_weight_only(), W4A8])
@pytest.mark.parametrize("name", ["llama", "tied", "bf16", "gpt2", "bert"])
def test_a_loaded_model_is_the_one_that_quantize_makes(name, embeddings, tmp_path):
    cls, folder = MODELS[name][0], save(name, tmp_path)
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(embeddings=embeddings))
    model, taken = cls.from_pretrained(folder), formats(loaded)
    report = lowbit.quantize_(model, embeddings, lambda module, name: name in taken, head=None)
    assert taken == formats(model) and taken
    assert torch.equal(logits(loaded), logits(model))
    ours = loaded.hf_quantizer.report
    assert repr([row for row in ours.rows if row.format]) == repr(report.quantized)  # nan is no longer equal to itself in a row of Python 3.13
    assert (ours.model_bytes_before, ours.model_bytes_after) == (report.model_bytes_before, report.model_bytes_after)
    head, table = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    tied = model.config.tie_word_embeddings
    assert (head.weight is table.weight) == (type(head) is lowbit.QuantLinear) == tied
    assert type(table) is lowbit.QuantEmbedding


def test_without_being_asked_embeddings_stay_float(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8))
    assert type(loaded.model.embed_tokens) is nn.Embedding and "model.embed_tokens" not in notes(loaded)
    assert "embeddings" not in loaded.config.quantization_config.to_dict()


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "bert"])
def test_saved_and_loaded_it_is_the_same_bit_for_bit_and_that_of_the_command_line(name, shard, tmp_path):
    cls, folder = MODELS[name][0], save(name, tmp_path, max_shard_size=shard)
    config = lowbit.LowbitConfig(W4A8, embeddings=INT8)
    loaded = cls.from_pretrained(folder, quantization_config=config)
    loaded.save_pretrained(tmp_path / "packed", max_shard_size=shard)
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["embeddings"] == str(INT8)
    arguments = ["--config", str(W4A8), "--embeddings", "int8_weight_only()"]
    assert main(["quantize", str(folder), str(tmp_path / "by command"), *arguments]) == 0
    wanted = loaded.state_dict()
    for place in ("packed", "by command"):
        again = cls.from_pretrained(tmp_path / place)
        assert formats(again) == formats(loaded) and "int8 per-channel" in formats(again).values()
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in again.state_dict().items())
        assert torch.equal(logits(again), logits(loaded))
        assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == loaded.config.tie_word_embeddings
        fresh = cls(loaded.config).eval()
        lowbit.load(fresh, tmp_path / place)
        assert torch.equal(logits(fresh), logits(loaded))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(cls.from_pretrained(tmp_path / "again")), logits(loaded))
    assert formats(again.dequantize()) == {}


@pytest.mark.parametrize("name", ["tied", "gpt2", "bert", "llama"])
def test_a_folder_in_another_layout_loads_tied(name, tmp_path):
    cls, folder = MODELS[name][0], save(name, tmp_path)
    wanted = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8, embeddings=INT8))
    wanted.save_pretrained(tmp_path / "rows")
    file = tmp_path / "rows" / "model.safetensors"
    safetensors.save_file(lowbit.quant.repack(safetensors.load_file(file)), file, {"format": "pt"})
    loaded = cls.from_pretrained(tmp_path / "rows")
    assert formats(loaded) == formats(wanted) and torch.equal(logits(loaded), logits(wanted))
    head, table = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    assert (head.weight is table.weight) == loaded.config.tie_word_embeddings
    fresh = cls(wanted.config).eval()
    lowbit.load(fresh, tmp_path / "rows")
    assert torch.equal(logits(fresh), logits(wanted))
    head, table = fresh.get_output_embeddings(), fresh.get_input_embeddings()
    assert (head.weight is table.weight) == loaded.config.tie_word_embeddings


def test_a_file_that_holds_the_head_of_a_tied_pair_alone_is_read(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("tied", tmp_path)
    state = safetensors.load_file(folder / "model.safetensors")
    wanted = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(embeddings=INT8))
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(embeddings=INT8))
    assert formats(loaded) == formats(wanted) and torch.equal(logits(loaded), logits(wanted))
    assert notes(loaded)["model.embed_tokens"] == "shares the weight of lm_head"
    report = lowbit.quantize_checkpoint(folder, tmp_path / "packed", embeddings=INT8)
    assert {row.layer: row.note for row in report.quantized} == {"lm_head": "", "model.embed_tokens": "shares the weight of lm_head"}
    assert torch.equal(logits(cls.from_pretrained(tmp_path / "packed")), logits(wanted))


def test_a_plan_names_single_embeddings(tmp_path):
    folder = save("gpt2", tmp_path)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"transformer.wpe": "int4_weight_only(group_size=32)", "transformer.h.0.attn.c_attn": "int8_weight_only()"}))
    report = lowbit.quantize_checkpoint(folder, tmp_path / "packed", plan=plan)
    assert {row.layer: row.format for row in report.quantized} == {"transformer.wpe": "int4 g32", "transformer.h.0.attn.c_attn": "int8 per-channel"}
    assert formats(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "packed")) == {row.layer: row.format for row in report.quantized}
    config = lowbit.LowbitConfig(plan={"transformer.wpe": None}, embeddings=INT8)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder, quantization_config=config)
    assert formats(loaded) == dict.fromkeys(("transformer.wte", "lm_head"), "int8 per-channel")
    assert notes(loaded)["transformer.wpe"] == "transformer.wpe is to stay float"


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"modules_to_not_convert": ["lm_head"]}, "lm_head, which has the same weight: named by modules_to_not_convert"),
        ({"modules_to_not_convert": ["embed_tokens"]}, "model.embed_tokens, which has the same weight: named by modules_to_not_convert"),
        ({"plan": {"lm_head": None}}, "lm_head is to stay float"),
    ],
)
def test_a_tied_pair_of_which_one_is_to_stay_float_stays_float(options, note, tmp_path):
    folder, other = save("tied", tmp_path), "model.layers.0.mlp.up_proj"
    config = lowbit.LowbitConfig(embeddings=INT8, **options | {"plan": {other: W4A8, **options.get("plan", {})}})
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    assert set(formats(loaded)) == {other} and notes(loaded)["model.embed_tokens"] == note
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "plan", "match"),
    [
        ("tied", {"lm_head": INT8, "model.embed_tokens": INT4}, "plan must give layers that share a weight one format, got lm_head: int8.*model.embed_tokens: int4"),
        ("tied", {"lm_head": None, "model.embed_tokens": INT4}, "plan must give layers that share a weight one format"),
        ("llama", {"model.norm": INT8}, "plan must name linear layers and embeddings of the model, got model.norm"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, plan, match, tmp_path):
    folder = save(name, tmp_path)
    with pytest.raises(ValueError, match=f"LowbitConfig: .*{match}"):
        MODELS[name][0].from_pretrained(folder, quantization_config=lowbit.LowbitConfig(plan=plan))


def test_subclasses_of_embedding_stay_float_and_are_named(tmp_path):
    config = transformers.OPTConfig(vocab_size=97, hidden_size=64, ffn_dim=96, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=64)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    loaded = transformers.OPTForCausalLM.from_pretrained(tmp_path, quantization_config=lowbit.LowbitConfig(embeddings=INT8))
    assert set(formats(loaded)) == {"model.decoder.embed_tokens", "lm_head"}
    assert notes(loaded)["model.decoder.embed_positions"] == "OPTLearnedPositionalEmbedding is a subclass of nn.Embedding"


@pytest.mark.parametrize("name, wanted", (("llama", "row-major"), ("tied", "x86-panel-16x64")))
def test_a_folder_is_written_for_a_program_that_reads_it(tmp_path: Path, name, wanted):
    """The bytes that are saved: the table row by row where it is alone, once where a head shares it."""
    folder = save(name, tmp_path / name)
    lowbit.quantize_checkpoint(folder, tmp_path / name / "packed", embeddings=INT8)
    state = safetensors.load_file(tmp_path / name / "packed" / "model.safetensors")
    numbers = state["model.embed_tokens.layout"]
    assert lowbit.quant.layout.numbers_of(numbers).layout == wanted
    assert ("lm_head.layout" in state) == (name == "tied") and ("lm_head.weight" in state) == (name == "llama")
