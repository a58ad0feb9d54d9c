# SPDX-License-Identifier: Apache-2.0
"""State spaces, short convolutions and Qwen3-Next in GGUF files, beside the models of transformers that they were written
from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf_beside_llama import distances, logits_of_llama_cpp
from gguf_files import TOKENS, distance, gguf, logits
from gguf_hybrids import CONFIGS, by_kind, converted, model_of, write_hybrid

import lowbit
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.saving import save
from lowbit.huggingface.load_gguf import load_gguf, load_model
from lowbit.models.token_run import TokenRun

READ_BY_OTHERS = {"mamba": {"dt_proj"}, "falcon mamba": {"dt_proj"}}
"""Layers that are float, because transformers reads their weights."""


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_model_that_it_was_written_from(name, fuse, tmp_path):
    wanted = logits(write_hybrid(tmp_path / "model.gguf", name))
    model = load_model(tmp_path / "model.gguf", activations="float", fuse=fuse)
    assert distance(logits(model), wanted) < 2e-5
    config = model.config
    types = getattr(config, "layer_types", None) or config.layers_block_type
    assert list(types) == list(CONFIGS[name].layer_types) and len(types) == CONFIGS[name].num_hidden_layers


@pytest.mark.parametrize("type", ["F16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_type_is_read_as_its_values(name, type, tmp_path):
    """A file of blocks beside one of float32 with the values that the gguf package decodes."""
    model = write_hybrid(tmp_path / "model.gguf", name, type)
    write_hybrid(tmp_path / "float.gguf", name, model=model, like=tmp_path / "model.gguf")
    wanted = logits(load_model(tmp_path / "float.gguf", activations="float", fuse=False))
    ours = load_model(tmp_path / "model.gguf", activations="float")
    assert distance(logits(ours), wanted) < (3e-2 if type == "Q4_1" else 1e-4)  # its zero points are rounded
    floats = {name.rpartition(".")[2] for name, module in ours.named_modules() if module.__class__ is torch.nn.Linear}
    assert floats <= READ_BY_OTHERS.get(name, set())


@pytest.mark.parametrize("name", CONFIGS)
def test_generated_text_is_that_of_transformers(name, tmp_path):
    asked = dict(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted = write_hybrid(tmp_path / "model.gguf", name).generate(TOKENS, **asked)
    model, tokenizer = load_gguf(tmp_path / "model.gguf", activations="float")
    assert torch.equal(model.generate(TOKENS, **asked), wanted)
    assert tokenizer("abc a")["input_ids"] == [5, 7]


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - READ_BY_OTHERS.keys()))
def test_a_token_of_generate_is_one_run(name, tmp_path, monkeypatch):
    write_hybrid(tmp_path / "model.gguf", name, "Q4_0")
    model = load_model(tmp_path / "model.gguf")
    runs = []
    of_token = TokenRun.logits

    def noted(self, tokens):
        runs.append(of_token(self, tokens))
        return runs[-1]

    monkeypatch.setattr(TokenRun, "logits", noted)
    model.generate(TOKENS, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert len(runs) == 7 and all(logits is not None for logits in runs)


@pytest.mark.parametrize("type", ["F32", "Q4_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_file_is_the_one_that_it_was_read_from(name, type, tmp_path):
    """Of float32 that was computed, to the last bits."""
    path = tmp_path / "model.gguf"
    write_hybrid(path, name, type)
    save(load_model(path, fuse=False), tmp_path / "copy.gguf", like=path)
    ours, theirs = GgufFile.open(tmp_path / "copy.gguf"), GgufFile.open(path)
    assert ours.metadata == theirs.metadata and ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        copy = ours.tensors[key]
        if name in READ_BY_OTHERS and key.endswith("ssm_dt.weight"):
            assert copy.type == "F32" and copy.shape == tensor.shape  # a float layer
            continue
        assert (copy.type, copy.shape) == (tensor.type, tensor.shape), key
        if key.endswith(("ssm_a", "norm.weight")):
            copied, value = (torch.frombuffer(each.data, dtype=torch.float32) for each in (copy, tensor))
            torch.testing.assert_close(copied, value, rtol=1e-6, atol=2e-7)
        else:
            assert bytes(copy.data) == bytes(tensor.data), key
    assert distance(logits(load_model(tmp_path / "copy.gguf", activations="float")), logits(load_model(path, activations="float"))) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_is_what_the_converter_writes(name, tmp_path):
    """From a model of transformers with other weights than those of the file that gives the names."""
    write_hybrid(tmp_path / "model.gguf", name)
    loaded = load_model(tmp_path / "model.gguf", activations="float", fuse=False)
    lowbit.dequantize_(loaded)
    torch.manual_seed(1)
    for key, parameter in loaded.named_parameters():
        if not key.endswith(("A_log", "dt_bias")):
            parameter.data.mul_(1 + 0.2 * torch.rand(parameter.shape))
    save(loaded, tmp_path / "changed.gguf", like=tmp_path / "model.gguf")
    if name == "qwen3next":  # its class has other projections
        again = load_model(tmp_path / "changed.gguf", activations="float", fuse=False)
        assert torch.equal(logits(again), logits(load_model(tmp_path / "changed.gguf", activations="float", fuse=False)))
        assert distance(logits(again), logits(loaded)) < 1e-5
        return
    wanted = converted(name, loaded)
    written = {tensor.name: torch.from_numpy(tensor.data.copy()).view(*map(int, reversed(tensor.shape))) for tensor in gguf.GGUFReader(tmp_path / "changed.gguf").tensors}
    assert written.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(written[key].double(), value, rtol=1e-6, atol=1e-7, msg=lambda told, key=key: f"{key}: {told}")


def test_experts_of_a_hybrid_are_packed(tmp_path):
    write_hybrid(tmp_path / "model.gguf", "nemotron_h_moe", "Q4_0")
    model = load_model(tmp_path / "model.gguf", activations="float", fuse=False)
    assert isinstance(model.model.layers[1].mixer.experts, lowbit.QuantExperts)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_llama_cpp(name, tmp_path):
    """In one prompt, of which it computes 512 tokens at once."""
    write_hybrid(tmp_path / "model.gguf", name)
    tokens, positions = np.random.default_rng(0).integers(0, 64, 700), (0, 3, 100, 511, 699)
    wanted = logits_of_llama_cpp(tmp_path / "model.gguf", tokens, positions)
    model = load_model(tmp_path / "model.gguf", activations="float")
    with torch.no_grad():
        ours = model(torch.from_numpy(tokens)[None]).logits[0, list(positions)]
    off = distances(ours, wanted)
    print(f"\n{name}: " + ", ".join(f"{value:.1e}" for value in off))
    assert max(off) < 1e-3


# ---- Qwen3-Next ----------------------------------------------------------------------------------------------------


def test_projections_of_qwen3next_may_have_any_types(tmp_path):
    types = {"attn_qkv.weight": "Q8_0", "attn_gate.weight": "Q4_0", "ssm_ba.weight": "Q5_0"}
    model = write_hybrid(tmp_path / "model.gguf", "qwen3next", "F16", types=types)
    write_hybrid(tmp_path / "float.gguf", "qwen3next", model=model, like=tmp_path / "model.gguf")
    ours = load_model(tmp_path / "model.gguf", activations="float")
    assert distance(logits(ours), logits(load_model(tmp_path / "float.gguf", activations="float", fuse=False))) < 1e-4
    assert ours.model.layers[0].linear_attn.in_proj_b.spec.format == "int5"


@pytest.mark.parametrize("type", ["F32", "Q4_0"])
def test_older_files_of_qwen3next_have_one_projection(type, tmp_path):
    def of_older_files(tensors):
        for layer in range(3):
            joined = model.model.layers[layer].linear_attn.in_proj_qkvz.weight.detach().double()
            parts = [tensors.pop(f"blk.{layer}.attn_{of}.weight") for of in ("qkv", "gate")]
            assert all(map(torch.equal, by_kind(model.config, joined), parts))
            tensors[f"blk.{layer}.ssm_in.weight"] = joined

    model = model_of("qwen3next")
    write_hybrid(tmp_path / "model.gguf", "qwen3next", type, model=model)
    write_hybrid(tmp_path / "older.gguf", "qwen3next", type, model=model, change=of_older_files)
    older, newer = (load_model(tmp_path / f"{name}.gguf", activations="float", fuse=False) for name in ("older", "model"))
    assert torch.equal(logits(older), logits(newer))
    save(older, tmp_path / "copy.gguf", like=tmp_path / "older.gguf")
    ours, theirs = GgufFile.open(tmp_path / "copy.gguf"), GgufFile.open(tmp_path / "older.gguf")
    assert bytes(ours.tensors["blk.0.ssm_in.weight"].data) == bytes(theirs.tensors["blk.0.ssm_in.weight"].data)


def test_parts_of_one_tensor_must_be_packed_alike(tmp_path):
    write_hybrid(tmp_path / "model.gguf", "qwen3next", "Q4_0")
    model = load_model(tmp_path / "model.gguf", fuse=False)
    model.model.layers[0].linear_attn.in_proj_b = torch.nn.Linear(64, 6, bias=False)
    with pytest.raises(ValueError, match="save: blk.0.ssm_ba.weight holds one type, got F32 of .*in_proj_b.weight, Q4_0 of .*in_proj_a.weight"):
        save(model, tmp_path / "copy.gguf", like=tmp_path / "model.gguf")
    assert not (tmp_path / "copy.gguf").exists()


# ---- files that are refused ----------------------------------------------------------------------------------------

WRONG = {
    ("lfm2", "attention.head_count_kv"): ([0, 2, 1, 0], "for each layer 0 or a number that is the same for all others, got .0, 2, 1, 0."),
    ("lfm2", "shortconv.l_cache"): (0, "one number from 1 on, got 0"),
    ("mamba", "attention.head_count"): (2, "0 .every layer is a state space., got 2"),
    ("mamba", "ssm.inner_size"): (100, "a multiple of the embedding_length 64, got 100"),
    ("mamba2", "ssm.time_step_rank"): (7, "a divisor of the 7 heads, got 2"),
    ("granitehybrid", "rope.scaling.finetuned"): (True, "False .Bamba, whose attention rotates, is another model., got True"),
    ("granitehybrid", "expert_shared_feed_forward_length"): (32, "0 or 96 .as many as feed_forward_length, where the model has no experts., got 32"),
    ("nemotron_h", "feed_forward_length"): ([0, 96, 0, 0, 64], "for each layer 0 or a number that is the same for all others"),
    ("nemotron_h", "attention.head_count_kv"): ([0, 2, 2, 0, 0], "0 in layer 1, which has attention"),
    ("qwen3next", "ssm.inner_size"): (190, "a multiple of the 6 value heads, got 190"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "key"), WRONG)
def test_a_key_that_the_model_cannot_follow_is_refused_by_name(name, key, tmp_path):
    value, message = WRONG[name, key]

    def more(writer: gguf.GGUFWriter) -> None:
        add = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(f"{name}.{key}", value)

    write_hybrid(tmp_path / "model.gguf", name, more=more)
    with pytest.raises(ValueError, match=f"model.gguf: .*must be {message}"):
        load_model(tmp_path / "model.gguf")


def test_a_tensor_of_two_parameters_must_have_the_rows_of_both(tmp_path):
    def change(tensors):
        tensors["blk.0.ssm_ba.weight"] = tensors["blk.0.ssm_ba.weight"][:6]

    write_hybrid(tmp_path / "model.gguf", "qwen3next", change=change)
    with pytest.raises(ValueError, match=r"model.gguf: .*the shape of blk.0.ssm_ba.weight must be \[12, 64\], got \[6, 64\]"):
        load_model(tmp_path / "model.gguf")
