# SPDX-License-Identifier: Apache-2.0
"""GGUF files: whole models against transformers' reading of the same file, and damaged files. Blocks alone are in
test_gguf_blocks.py, metadata in test_gguf_metadata.py."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from gguf_files import CONFIGS, distance, gguf, logits, transformers, write

import lowbit
from lowbit import _C
from lowbit.__main__ import main
from lowbit.checkpoints.gguf import saving
from lowbit.checkpoints.gguf.blocks import BLOCK_TYPES, pack_blocks
from lowbit.checkpoints.gguf.config import config_of
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.saving import save
from lowbit.checkpoints.gguf.weights import StateReader
from lowbit.formats.spec import StoredWeight
from lowbit.huggingface.quantize_gguf import quantize_to_file
from lowbit.quant.codes import CodedWeight
from lowbit.quant.load import load


def on_meta(file: GgufFile) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_of(file), dtype=torch.float32)


def read(path: Path, activations: str = "float") -> torch.nn.Module:
    """The model alone: these files have no words."""
    file = GgufFile.open(path)
    model = on_meta(file)
    load(model, StateReader(file, model, activations).read())
    return model.eval()


def in_float(path: Path) -> torch.nn.Module:
    model = read(path)
    lowbit.dequantize_(model)
    return model


def in_transformers(path: Path) -> torch.nn.Module:
    """As transformers reads the weights; of the configuration it leaves out a part."""
    config = config_of(GgufFile.open(path))
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=torch.float32)


@pytest.mark.parametrize("type", ["Q4_0", "Q6_K"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_computes_what_transformers_reads(name, type, tmp_path):
    path = write(tmp_path / "model.gguf", name, type)
    wanted = in_transformers(path)
    model = read(path)
    assert sum(isinstance(module, lowbit.QuantLinear) for module in model.modules()) > 8
    assert distance(logits(model), logits(wanted)) < (1e-5 if type == "Q4_0" else 2e-3)
    assert distance(logits(read(path, "int8")), logits(wanted)) < 0.3


@pytest.mark.parametrize("type", [*BLOCK_TYPES, "F32", "F16"])
def test_a_model_of_every_type(type, tmp_path):
    wanted = in_transformers(write(tmp_path / "model.gguf", "tied", type))
    assert distance(logits(read(tmp_path / "model.gguf")), logits(wanted)) < 5e-3
    assert distance(logits(read(tmp_path / "model.gguf", "int8")), logits(wanted)) < 0.5


def test_the_slow_reader_of_the_gguf_package_is_not_asked(tmp_path, monkeypatch):
    """It makes a view of every word: 3 to 6 s for 49,152 of them."""
    path = write(tmp_path / "model.gguf", "llama", words=True)
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda *args: pytest.fail("GGUFReader"))
    tokenizer = lowbit.load_gguf(path)[1]
    assert tokenizer("abc ab<|end|>")["input_ids"] == [5, 6, 4, 8]


def test_a_tied_table_and_head_are_one_packed_weight(tmp_path):
    model = read(write(tmp_path / "model.gguf", "tied", "Q4_1", embedding="Q8_0"))
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is table.weight and head.spec.format == table.spec.format == "int8"


def test_from_pretrained_reads_the_same_and_saves_what_it_read(tmp_path):
    path = write(tmp_path / "model.gguf", "tied", "Q4_1", embedding="Q8_0")
    config = lowbit.LowbitConfig("gguf", activations="float")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, quantization_config=config)
    assert torch.equal(logits(model.eval()), logits(read(path)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path / "packed")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(logits(again.eval()), logits(model))


def test_the_configuration_needs_a_file(tmp_path):
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gguf_file must name the file in the folder"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=lowbit.LowbitConfig("gguf"))
    with pytest.raises(ValueError, match="activations must be 'int8', 'float' or None, got 'int4'"):
        lowbit.LowbitConfig("gguf", activations="int4")
    with pytest.raises(ValueError, match="must not be given with 'gguf'"):
        lowbit.LowbitConfig("gguf", embeddings="int8_weight_only()")


def test_a_parameter_that_the_file_has_not_is_named(tmp_path):
    file = GgufFile.open(write(tmp_path / "model.gguf", "llama"))
    del file.tensors["blk.1.ffn_up.weight"]
    model = on_meta(file)
    with pytest.raises(ValueError, match="got none for model.layers.1.mlp.up_proj.weight"):
        StateReader(file, model, "float").read()


# ---- saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", ["Q4_0", "Q5_0", "Q8_0", "MXFP4", "F16", "F32"])
@pytest.mark.parametrize("name", ["llama", "tied", "gemma2", "gpt2", "nemotron"])
def test_a_saved_model_is_the_file_that_it_was_read_from(name, type, tmp_path):
    path = write(tmp_path / "model.gguf", name, type)
    save(read(path), tmp_path / "saved.gguf", like=path)
    wanted, saved = GgufFile.open(path), GgufFile.open(tmp_path / "saved.gguf")
    assert saved.metadata == wanted.metadata and saved.tensors.keys() == wanted.tensors.keys()
    for tensor in wanted.tensors.values():
        ours = saved.tensors[tensor.name]
        assert (ours.type, ours.shape) == (tensor.type, tensor.shape), tensor.name
        assert bytes(ours.data) == bytes(tensor.data) or (tensor.type, "norm" in tensor.name) == ("F32", True), tensor.name
    assert torch.allclose(logits(read(tmp_path / "saved.gguf")), logits(read(path)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("type", ["Q4_1", "Q5_1"])
def test_a_saved_model_with_minimums_is_read_as_the_same_codes(type, tmp_path):
    """The minimums of the file are not in the model: its zero points are minimums by scales, in float16."""
    path = write(tmp_path / "model.gguf", "llama", type)
    model = read(path)
    save(model, tmp_path / "saved.gguf", like=path)
    assert GgufFile.open(tmp_path / "saved.gguf").tensors["blk.0.attn_q.weight"].type == type
    again = read(tmp_path / "saved.gguf").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items() if "weight" in name)


@pytest.mark.parametrize("config", [lowbit.int4_weight_only(32), lowbit.int8_weight_only(32)])
def test_scales_below_the_normal_numbers_of_float16_are_rounded(config):
    """Rows of a head whose words were never trained are that small; 11 bits of their scales are stored here."""
    sizes = torch.logspace(-9, 0, 64)[:, None]
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * sizes
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with torch.no_grad():
        layer[0].weight.copy_(weight)
    lowbit.quantize_(layer, config)
    stored = StoredWeight(layer[0].spec, 64, 64, _C.LAYOUT)
    written, type = saving._blocks(layer[0].weight.data, stored)
    read = pack_blocks(written.view(64, 2, -1), BLOCK_TYPES[type])
    ours, theirs = (CodedWeight.unpack(packed, stored) for packed in (layer[0].weight.data, read))
    small = ours.scale < 2.0**-14
    assert small.any() and not small.all() and torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scale[~small], theirs.scale[~small])
    assert 0 < (ours.scale - theirs.scale).abs().max() <= 2.0**-25


def test_zero_points_that_no_minimum_stands_for_are_refused():
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    spec = BLOCK_TYPES["Q4_1"].spec("float")
    weight = CodedWeight(spec, codes, torch.ones(16), torch.full((16, 1), 2.0**-20).half(), torch.full((16, 1), 3.14).half())
    with pytest.raises(ValueError, match="zero points times their scales must be float16 numbers, got 16"):
        saving._blocks(weight.pack(), StoredWeight(spec, 16, 32, _C.LAYOUT))


def test_a_model_quantized_here_is_what_others_read(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", "F32")
    model = in_float(path)
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    save(model, tmp_path / "saved.gguf", like=path)
    assert distance(logits(in_transformers(tmp_path / "saved.gguf")), logits(model)) < 1e-5
    assert GgufFile.open(tmp_path / "saved.gguf").tensors["blk.0.attn_q.weight"].type == "Q4_0"


def test_quantize_in_a_terminal_writes_a_file(tmp_path, capsys):
    """From a file, and from a folder with the metadata of that file."""
    path = write(tmp_path / "model.gguf", "llama", "F32")
    config = "int4_weight_only(group_size=32)"
    assert main(["quantize", str(path), str(tmp_path / "four.gguf"), "--config", config]) == 0
    assert "int4" in capsys.readouterr().out
    tensors = GgufFile.open(tmp_path / "four.gguf").tensors
    assert (tensors["blk.0.attn_q.weight"].type, tensors["output.weight"].type) == ("Q4_0", "Q8_0")
    in_float(path).save_pretrained(tmp_path / "folder")
    arguments = ["quantize", str(tmp_path / "folder"), str(tmp_path / "eight.gguf"), "--config", "int8_weight_only(group_size=32)"]
    assert main([*arguments, "--like", str(path), "--modules-to-not-convert", "model.layers.1", "lm_head"]) == 0
    tensors = GgufFile.open(tmp_path / "eight.gguf").tensors
    assert (tensors["blk.0.attn_q.weight"].type, tensors["blk.1.attn_q.weight"].type) == ("Q8_0", "F32")
    assert distance(logits(read(tmp_path / "eight.gguf")), logits(read(path))) < 0.05
    for wrong, text in (
        (arguments, "like must be a GGUF file"),
        ([*arguments, "--like", str(path), "--embeddings", "int8_weight_only()"], "and none of --plan, --embeddings"),
        (["quantize", str(path), str(tmp_path / "out"), "--config", config], "are for a .gguf OUT"),
        (["quantize", str(path), str(tmp_path / "out.gguf"), "--config", "nf4_weight_only()"], "no GGUF type holds"),
    ):
        assert main(wrong) == 1 and text in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists() and not (tmp_path / "out").exists()


KEPT = {
    "model.layers.1": {"blk.1.attn_q", "blk.1.ffn_up", "blk.1.ffn_down"},
    "_proj": {"blk.0.attn_q", "blk.1.attn_q", "blk.0.ffn_up", "blk.1.ffn_up", "blk.0.ffn_down", "blk.1.ffn_down"},
    "up_proj": {"blk.0.ffn_up", "blk.1.ffn_up"},
    r"model.layers.\d+.mlp": {"blk.0.ffn_up", "blk.1.ffn_up", "blk.0.ffn_down", "blk.1.ffn_down"},
    "lm_head": {"output"},
}


@pytest.mark.parametrize("pattern", KEPT)
def test_names_that_stay_float_mean_the_same_for_a_file_and_a_folder(pattern, tmp_path):
    path = write(tmp_path / "model.gguf", "llama", "F32")
    in_float(path).save_pretrained(tmp_path / "folder")
    config = "int4_weight_only(group_size=32)"
    report = quantize_to_file(path, tmp_path / "out.gguf", config, modules_to_not_convert=[pattern])
    tensors = GgufFile.open(tmp_path / "out.gguf").tensors
    names = [f"blk.{layer}.{name}" for layer in (0, 1) for name in ("attn_q", "ffn_up", "ffn_down")]
    assert {name for name in (*names, "output") if tensors[f"{name}.weight"].type == "F32"} == KEPT[pattern]
    of_folder = lowbit.quantize_checkpoint(tmp_path / "folder", tmp_path / "out", config, modules_to_not_convert=[pattern])
    assert {row.layer: (row.format, row.note) for row in report.rows} == {row.layer: (row.format, row.note) for row in of_folder.rows}


def test_a_file_is_calibrated_on_text_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lowbit.quant.own_text.TOKENS", 24)
    path, config = write(tmp_path / "model.gguf", "llama", "F32"), "int4_weight_only(group_size=32)"
    report = quantize_to_file(path, tmp_path / "own.gguf", config, calibration="self")
    quantize_to_file(path, tmp_path / "plain.gguf", config)
    assert "calibrated on 16 x 24 tokens that the model wrote by itself" in report.notes
    own, plain = (GgufFile.open(tmp_path / f"{name}.gguf").tensors["blk.0.ffn_up.weight"] for name in ("own", "plain"))
    assert own.type == plain.type == "Q4_0"
    assert (tmp_path / "own.gguf").read_bytes() != (tmp_path / "plain.gguf").read_bytes()
    given = ["quantize", str(path), str(tmp_path / "other.gguf"), "--config", config, "--calibration"]
    (tmp_path / "words.txt").write_text("words")
    assert main([*given, str(tmp_path / "words.txt")]) == 1
    assert "--calibration of a .gguf OUT must be self" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["layers.1", "model.layers.1.mlp.up", "lm_heat"])
def test_a_name_that_matches_no_layer_is_refused(pattern, tmp_path):
    """It is no beginning and no end of a name."""
    path, config = write(tmp_path / "model.gguf", "llama", "F32"), "int4_weight_only(group_size=32)"
    with pytest.raises(ValueError, match=f"modules_to_not_convert must match linear layers or embeddings .*, got '{pattern}'; the nearest"):
        quantize_to_file(path, tmp_path / "out.gguf", config, modules_to_not_convert=[pattern])
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(("config", "head", "type"), [("int4", "int8", "Q8_0"), ("int8", "int8", "Q8_0"), ("int8", None, "F32")])
def test_a_tied_table_is_packed_as_the_head(config, head, type, tmp_path):
    path = write(tmp_path / "model.gguf", "tied", "F32")
    report = quantize_to_file(path, tmp_path / "out.gguf", f"{config}_weight_only(group_size=32)", head=head)
    tensors = GgufFile.open(tmp_path / "out.gguf").tensors
    assert tensors["token_embd.weight"].type == type and tensors["blk.0.attn_q.weight"].type != "F32"
    formats = {row.layer: row.format for row in report.rows}
    assert (formats["lm_head"] == "") == (type == "F32")  # the report says what is in the file


@pytest.mark.parametrize("config", [None, lowbit.int8_weight_only(group_size=32)], ids=str)
def test_a_head_that_was_untied_is_in_the_file(config, tmp_path):
    path = write(tmp_path / "model.gguf", "tied", "F32")
    model = read(path)
    lowbit.dequantize_(model)
    lowbit.rotate_(model)
    if config is not None:
        lowbit.quantize_(model, config)
    save(model, tmp_path / "saved.gguf", like=path)
    assert "output.weight" in GgufFile.open(tmp_path / "saved.gguf").tensors
    again = read(tmp_path / "saved.gguf")
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    assert distance(logits(again), logits(model)) < 1e-5


def test_a_parameter_without_a_name_in_files_is_refused(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", "F32")
    model = read(path)
    model.model.temperature = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="save: like must name a tensor for every parameter .* model.temperature"):
        save(model, tmp_path / "saved.gguf", like=path)
    assert not (tmp_path / "saved.gguf").exists()


@pytest.mark.parametrize("config", (lowbit.int4_weight_only(group_size=64), lowbit.nf4_weight_only(group_size=32)), ids=str)
def test_codes_that_no_type_holds_are_refused_by_name(tmp_path, config):
    path = write(tmp_path / "model.gguf", "llama", "F32")
    model = in_float(path)
    lowbit.quantize_(model, config)
    with pytest.raises(ValueError, match="no GGUF type holds"):
        save(model, tmp_path / "saved.gguf", like=path)
    assert not (tmp_path / "saved.gguf").exists()


# ---- damaged files -------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path, subtests):
    whole = write(tmp_path / "model.gguf", "llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 8, 23, 24, 100, 500, len(whole) // 2, len(whole) - 1]:
        with subtests.test(length=length):
            cut.write_bytes(whole[:length])
            with pytest.raises(ValueError, match="cut.gguf"):
                GgufFile.open(cut)


def patched(tmp_path: Path, at: int, value: bytes) -> Path:
    whole = bytearray(write(tmp_path / "model.gguf", "llama").read_bytes())
    whole[at : at + len(value)] = value
    (tmp_path / "patched.gguf").write_bytes(whole)
    return tmp_path / "patched.gguf"


@pytest.mark.parametrize(
    "at, value, message",
    [
        (0, b"GGML", "must begin with b'GGUF'"),
        (4, struct.pack(">I", 3), "the other byte order"),
        (4, struct.pack("<I", 9), "must be 2 or 3, got 9"),
        (8, struct.pack("<Q", 1 << 60), "1 to 4 dimensions"),
        (16, struct.pack("<Q", 1 << 60), "it is cut or damaged"),
        (24, struct.pack("<Q", 1 << 62), "it is cut or damaged"),
    ],
)
def test_a_damaged_header_is_named(at, value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        GgufFile.open(patched(tmp_path, at, value))


def test_a_type_that_nobody_knows_and_a_tensor_beyond_the_end(tmp_path, subtests):
    path = write(tmp_path / "model.gguf", "llama")
    whole = path.read_bytes()
    at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    for offset, value, message in [
        (4 + 16, struct.pack("<I", 9999), "type of tensor blk.0.attn_q.weight must be one of 0.*got 9999$"),
        (4 + 16, struct.pack("<I", 139), r"must be one of 0.*got 139 \(IQ4_K of ik_llama.cpp\)$"),
        (4 + 16 + 4, struct.pack("<Q", 1 << 40), "tensor blk.0.attn_q.weight must end at byte"),
        (4, struct.pack("<Q", 33), "whole blocks of 32 for Q4_0"),
        (0, struct.pack("<I", 77), "1 to 4 dimensions, got 77"),
    ]:
        with subtests.test(message):
            damaged = bytearray(whole)
            damaged[at + offset : at + offset + len(value)] = value
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=message):
                GgufFile.open(path)


def written(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()


def test_parts_of_a_split_file(tmp_path):
    path = write(tmp_path / "model.gguf", "llama")
    whole = GgufFile.open(path)
    names = sorted(whole.tensors)
    for number, part in enumerate((names[:5], names[5:])):
        writer = gguf.GGUFWriter(tmp_path / f"model-0000{number + 1}-of-00002.gguf", "llama")
        for key, value in whole.metadata.items():
            if number == 0 and key != "general.architecture":
                writer.add_key_value(key, value, whole.kinds[key])
        writer.add_uint16("split.count", 2), writer.add_uint16("split.no", number)
        writer.add_int32("split.tensors.count", len(names))
        for name in part:
            tensor = whole.tensors[name]
            kind = gguf.GGMLQuantizationType[tensor.type]
            data = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).numpy().reshape(tensor.shape[0], -1)
            if kind == gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name, data.view("float32").reshape(tensor.shape))
            else:
                writer.add_tensor(name, data, raw_dtype=kind)
        written(writer)
    first = tmp_path / "model-00001-of-00002.gguf"
    assert torch.equal(logits(read(first)), logits(read(path)))
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.gguf, another of its 2 parts, must lie beside it"):
        GgufFile.open(first)
