# SPDX-License-Identifier: Apache-2.0
"""`lowbit quantize` of a folder that another package quantized: its codes in packed weights, as
LowbitConfig("checkpoint") makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.checkpoints.read_checkpoints import read
from tests.checkpoints.test_awq_checkpoints import awq
from tests.checkpoints.test_awq_checkpoints import settings as settings_of_awq
from tests.checkpoints.test_compressed_tensors import nvfp4
from tests.checkpoints.test_compressed_tensors import settings as settings_of_compressed_tensors
from tests.checkpoints.test_gptq_checkpoints import gptq, settings
from tests.tiny.quantized_checkpoints import WIDE, prompt, write
from tests.tiny.tiny_models import transformers

import lowbit
from lowbit.__main__ import main
from lowbit.checkpoints import sharded_files

NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CASES = {
    "gptq in act order": (settings(desc_act=True), gptq(desc_act=True), "llama"),
    "awq with experts": (settings_of_awq(), awq(), "mixtral"),
    "nvfp4 with a float head": (settings_of_compressed_tensors("nvfp4-pack-quantized", NVFP4), nvfp4, "llama"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_folder_is_what_from_pretrained_makes(case, tmp_path, monkeypatch, capsys):
    told, form, name = CASES[case]
    in_parts = name == "mixtral"
    folder, out = tmp_path / "model", tmp_path / "packed"
    write(folder, told, form, name, num_hidden_layers=1)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "quantize_config.json").write_text("{}")
    if in_parts:
        monkeypatch.setattr(sharded_files, "_LARGEST", 100_000)
    assert main(["quantize", str(folder), str(out)]) == 0
    wanted, found = read(folder), transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    mine, theirs = found.state_dict(), wanted.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert torch.equal(found(prompt()).logits, wanted(prompt()).logits)
    entry = json.loads((out / "config.json").read_text())["quantization_config"]
    assert entry == wanted.config.quantization_config.to_dict()
    assert (out / "tokenizer.json").exists() and not (out / "quantize_config.json").exists()
    assert (out / "model.safetensors.index.json").exists() == in_parts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model-meant", "packed"]
    printed = capsys.readouterr().out
    assert f"the codes of {told['quant_method']}" in printed and "the codes of the file" in printed


def test_activations(tmp_path):
    write(tmp_path / "model", settings(sym=True), gptq(sym=True), num_hidden_layers=1)
    report = lowbit.quantize_checkpoint(tmp_path / "model", tmp_path / "packed", "checkpoint", activations="int8")
    assert {row.format for row in report.quantized} == {"int4 g128 int8-activations"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert model.lm_head.spec.x_format == "int8_group"


REFUSED = {
    "a format": ({"config": "int8_weight_only()"}, "is quantized already, by 'gptq'; .*leave out config: its codes"),
    "settings of float folders": (
        {"head": None, "embeddings": "int8_weight_only()"},
        "give it the float model, or leave out embeddings, head: its codes are packed as they are",
    ),
    "activations": ({"activations": "int4"}, "activations must be 'int8', 'float' or None, got 'int4'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_need_float_weights_are_refused(case, tmp_path):
    given, message = REFUSED[case]
    write(tmp_path / "model", settings(), gptq(), num_hidden_layers=1)
    with pytest.raises(ValueError, match=message):
        lowbit.quantize_checkpoint(tmp_path / "model", tmp_path / "packed", **given)
    assert not (tmp_path / "packed").exists()


def test_folders_without_codes_of_others_are_refused(tmp_path):
    write(tmp_path / "model", settings(), gptq(), num_hidden_layers=1)
    for given in ({"config": "checkpoint"}, {}, {"config": "int8_weight_only()", "activations": "int8"}):
        with pytest.raises(ValueError, match="needs config, plan or embeddings, and no activations, for .*model-meant"):
            lowbit.quantize_checkpoint(tmp_path / "model-meant", tmp_path / "packed", **given)
    lowbit.quantize_checkpoint(tmp_path / "model", tmp_path / "packed")
    with pytest.raises(ValueError, match="packed is quantized already, by 'lowbit'; give it the float model$"):
        lowbit.quantize_checkpoint(tmp_path / "packed", tmp_path / "again")


def test_a_damaged_tensor_is_named_before_anything_is_written(tmp_path):
    def damaged(name: str, n: int, k: int, generator: torch.Generator):
        tensors, weight = gptq()(name, n, k, generator)
        if name == "model.layers.0.self_attn.v_proj":
            tensors[".scales"][0, 0] = float("inf")
        return tensors, weight

    write(tmp_path / "model", settings(), damaged, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"model.safetensors: model.layers.0.self_attn.v_proj.scales must be finite"):
        lowbit.quantize_checkpoint(tmp_path / "model", tmp_path / "packed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model-meant"]


def test_one_layer_is_in_memory_at_a_time(python: Callable[..., str], tmp_path: Path):
    """The peak is that of one layer and what its codes pass through, whatever the file holds."""
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    for name, config in (("small", WIDE), ("large", WIDE | large)):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        lowbit.quantize_(model, lowbit.int4_weight_only(group_size=128, scale="absmax"), head=None)
        lowbit.save(model, tmp_path / name, "gptq")  # 48 MB
    code = """
import sys, lowbit
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
lowbit.quantize_checkpoint(sys.argv[1] + "/small", sys.argv[1] + "/small-packed")  # imports and first calls
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
lowbit.quantize_checkpoint(sys.argv[1] + "/large", sys.argv[1] + "/packed")
print(status("VmHWM") - before)
"""
    codes = 4096 * 1024 // 2
    printed = python(code, str(tmp_path), MALLOC_TRIM_THRESHOLD_="100000")  # glibc would keep up to 64 MB that are free
    assert int(printed.split()[-1]) < 12 * codes
