# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 in GGUF files, with and without experts, beside the models of transformers that they were written from."""

from __future__ import annotations

import pytest
import torch
from gguf_files import TOKENS, distance, gguf, logits
from gguf_qwen35 import CONFIGS, write_qwen35

import lowbit
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.saving import save
from lowbit.huggingface.load_gguf import load_model


@pytest.mark.parametrize("type", ["F32", "F16", "Q4_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_model_that_it_was_written_from(name, type, tmp_path):
    wanted = logits(write_qwen35(tmp_path / "model.gguf", name, type))
    for fuse in (False, True):
        model = load_model(tmp_path / "model.gguf", activations="float", fuse=fuse)
        assert distance(logits(model), wanted) < (3e-2 if type == "Q5_1" else 1e-4)  # its zero points are rounded
    out = model.model.layers[0].linear_attn.out_proj
    assert isinstance(out, lowbit.QuantLinear) and model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize("name", CONFIGS)
def test_generated_text_is_that_of_transformers(name, tmp_path):
    asked = dict(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted = write_qwen35(tmp_path / "model.gguf", name).generate(TOKENS, **asked)
    assert torch.equal(load_model(tmp_path / "model.gguf", activations="float").generate(TOKENS, **asked), wanted)


@pytest.mark.parametrize("type", ["F32", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_file_is_the_one_that_it_was_read_from(name, type, tmp_path):
    """Of float32 that was computed, to the last bit but one."""
    path = tmp_path / "model.gguf"
    write_qwen35(path, name, type)
    save(load_model(path, fuse=False), tmp_path / "copy.gguf", like=path)
    ours, theirs = GgufFile.open(tmp_path / "copy.gguf"), GgufFile.open(path)
    assert ours.metadata == theirs.metadata and ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        copy = ours.tensors[key]
        assert (copy.type, copy.shape) == (tensor.type, tensor.shape), key
        if key.endswith(("ssm_a", "norm.weight")):
            copied, value = (torch.frombuffer(each.data, dtype=torch.float32) for each in (copy, tensor))
            torch.testing.assert_close(copied, value, rtol=3e-7, atol=1e-7)
        else:
            assert type == "Q4_1" or bytes(copy.data) == bytes(tensor.data), key
    assert distance(logits(load_model(tmp_path / "copy.gguf")), logits(load_model(path))) < 1e-2


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    write_qwen35(tmp_path / "model.gguf", "qwen35", more=lambda writer: writer.add_nextn_predict_layers(1))
    assert len(load_model(tmp_path / "model.gguf").model.layers) == 3


WRONG = {
    "ssm.time_step_rank": (3, "a multiple of the 2 key heads, got 3"),
    "ssm.inner_size": (380, "a multiple of the 6 value heads, got 380"),
    "rope.dimension_sections": ([1, -1], r"a list of three numbers from 0 on, got \[1, -1\]"),
    "attention.sliding_window": (16, "0 or the context length"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_key_that_the_model_cannot_follow_is_refused_by_name(key, tmp_path):
    value, message = WRONG[key]

    def more(writer: gguf.GGUFWriter) -> None:
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"qwen35.{key}", value)

    write_qwen35(tmp_path / "model.gguf", "qwen35", more=more)
    with pytest.raises(ValueError, match=f"model.gguf: qwen35.{key} must be {message}"):
        load_model(tmp_path / "model.gguf")


def test_columns_move_in_whole_groups():
    from lowbit.checkpoints.gguf.blocks import order_of_groups

    assert order_of_groups(torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]), 4).tolist() == [1, 0]
    with pytest.raises(ValueError, match="columns must move in whole groups of 4"):
        order_of_groups(torch.tensor([2, 3, 0, 1]), 4)
