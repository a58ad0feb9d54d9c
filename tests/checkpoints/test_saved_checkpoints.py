# SPDX-License-Identifier: Apache-2.0
"""Models that lowbit.save writes in the layouts of other packages: decoded in float64 by the definition of each layout,
and read back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints.read_checkpoints import EXACT, decoded, largest, read
from tests.checkpoints.test_compressed_tensors import (
    FLOAT,
    TOKEN,
    float8,
    integers,
    mxfp4,
    nvfp4,
    weights,
)
from tests.checkpoints.test_compressed_tensors import settings as settings_of_compressed_tensors
from tests.checkpoints.test_gptq_checkpoints import gptq
from tests.checkpoints.test_gptq_checkpoints import settings as settings_of_gptq
from tests.tiny.float_codes import E2M1
from tests.tiny.quantized_checkpoints import WIDE, prompt, write
from tests.tiny.tiny_models import transformers

import lowbit
from lowbit.checkpoints import sharded_files
from lowbit.quant.kinds import is_packed

SMALL = WIDE | {"num_hidden_layers": 1}
ASYMMETRIC = lowbit.MappingType.ASYMMETRIC
UP = "model.layers.0.mlp.up_proj"


def bits_of(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first codes of a stream of bits along each row, int64 ``[rows, count]``."""
    flat = (words.long()[:, :, None] >> torch.arange(32) & 1).flatten(1)
    return (flat[:, : count * bits].view(len(words), count, bits) << torch.arange(bits)).sum(-1)


def decode_gptq(tensors, told, name, k):
    (scale, zeros, words) = (tensors[f"{name}.{part}"] for part in ("scales", "qzeros", "qweight"))
    bits = len(words) * 32 // k
    zero = bits_of(zeros, bits, scale.shape[1]) + (told["checkpoint_format"] == "gptq")
    group = tensors[f"{name}.g_idx"].long()
    codes = bits_of(words.t(), bits, k).t()
    assert scale.dtype is torch.float16 and words.dtype is zeros.dtype is torch.int32
    return (scale.double()[group] * (codes - zero[group])).t()


def decode_awq(tensors, told, name, k):
    (scale, zeros, words) = (tensors[f"{name}.{part}"] for part in ("scales", "qzeros", "qweight"))
    place = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where column i of 8 lies in the word
    codes, zero = ((part.long()[:, :, None] >> 4 * place & 15).flatten(1) for part in (words, zeros))
    group = torch.arange(k) // (k // len(scale))
    return (scale.double()[group] * (codes - zero[group])).t()


def decode_compressed_tensors(tensors, told, name, k):
    args = group_of(told, name)["weights"]
    bits, get = args["num_bits"], lambda part: tensors.get(f"{name}.weight{part}")
    scale = get("_scale")
    if args["type"] == "float" and bits == 4:
        codes = torch.stack((get("_packed") & 15, get("_packed") >> 4), dim=2).flatten(1).long()
        scale = (
            scale.double() / get("_global_scale").double() if args["group_size"] == 16 else 2 ** (scale.double() - 127)
        )
        return torch.tensor(E2M1, dtype=torch.float64)[codes] * scale.repeat_interleave(args["group_size"], 1)
    if get("_packed") is not None:
        n = len(get("_packed"))
        codes, zero = bits_of(get("_packed"), bits, k), get("_zero_point")
        zero = 2 ** (bits - 1) if zero is None else bits_of(zero.t(), bits, n).t()
        assert get("_shape").tolist() == [n, k]
    else:
        codes, zero = get("").double(), 0 if get("_zero_point") is None else get("_zero_point").double()
    scale = scale.double().repeat_interleave(-(-len(codes) // len(scale)), 0)
    spread = lambda part: part.repeat_interleave(k // part.shape[1], 1) if isinstance(part, torch.Tensor) else part  # noqa: E731
    return spread(scale) * (codes - spread(zero))


def group_of(told, name):
    groups = told["config_groups"].values()
    return next((group for group in groups if name in group["targets"]), told["config_groups"]["group_0"])


DECODERS = {"gptq": decode_gptq, "awq": decode_awq, "compressed-tensors": decode_compressed_tensors}


def llama(config, **more) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | more))
    lowbit.quantize_(model, config, head=None)
    return model


def check_saved(model: torch.nn.Module, out: Path, format: str) -> tuple[dict, torch.nn.Module]:
    """Save a model, decode its layers by the definition of the layout, and read it back; return its settings and the
    model that was read."""
    lowbit.save(model, out, format)
    told = json.loads((out / "config.json").read_text())["quantization_config"]
    tensors = {key: value for file in out.glob("*.safetensors") for key, value in load_file(file).items()}
    mine = decoded(model)
    for key, value in mine.items():
        if value.dim() == 3:
            continue  # experts, which have other names there
        found = DECODERS[format](tensors, told, key.removesuffix(".weight"), value.shape[1])
        assert ((found - value).abs() <= EXACT * largest(value)).all(), key
        assert key not in tensors or tensors[key].dtype in (torch.int8, torch.float8_e4m3fn)
    again = read(out)
    theirs = decoded(again)
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[key], mine[key]) for key in mine)
    return told, again


def check_answers(model: torch.nn.Module, again: torch.nn.Module) -> None:
    with torch.no_grad():
        assert torch.equal(again(prompt()).logits, model(prompt()).logits)


def intx(bits, group, **more):
    granularity = lowbit.PerGroup(group) if group else lowbit.PerAxis(0)
    return lowbit.IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=granularity, **more)


INTEGERS = {
    "gptq int4": ("gptq", lowbit.int4_weight_only(group_size=128)),
    "gptq int4 asymmetric": ("gptq", lowbit.int4_weight_only(group_size=32, mapping_type=ASYMMETRIC)),
    "gptq int2": ("gptq", intx(2, 64)),
    "gptq int3 asymmetric": ("gptq", intx(3, 64, mapping_type=ASYMMETRIC)),
    "gptq int8": ("gptq", intx(8, 128)),
    "compressed-tensors int4": ("compressed-tensors", lowbit.int4_weight_only(group_size=128)),
    "compressed-tensors int4 asymmetric": (
        "compressed-tensors", lowbit.int4_weight_only(group_size=32, mapping_type=ASYMMETRIC),
    ),
    **{f"compressed-tensors int{bits}": ("compressed-tensors", intx(bits, 64)) for bits in (2, 5, 6)},
    "compressed-tensors int3 asymmetric": ("compressed-tensors", intx(3, 32, mapping_type=ASYMMETRIC)),
    "compressed-tensors int7 by row": ("compressed-tensors", intx(7, 0)),
    "compressed-tensors int8 by row": ("compressed-tensors", lowbit.int8_weight_only()),
    "compressed-tensors float8": ("compressed-tensors", lowbit.float8_weight_only()),
}  # fmt: skip


@pytest.mark.parametrize("case", INTEGERS)
def test_codes_are_those_of_the_model(case, tmp_path):
    format, config = INTEGERS[case]
    model = llama(config)
    told, again = check_saved(model, tmp_path / "model", format)
    check_answers(model, again)
    assert told["quant_method"] == format
    specs = [m.get_submodule(UP).spec for m in (model, again)]
    assert specs[0].op_args(1, 1) == specs[1].op_args(1, 1)


@pytest.mark.parametrize("mapping", [{}, {"mapping_type": ASYMMETRIC}])
def test_awq(mapping, tmp_path):
    model = llama(lowbit.int4_weight_only(group_size=64, **mapping))
    lowbit.dequantize_(model.lm_head)
    told, again = check_saved(model, tmp_path / "model", "awq")
    check_answers(model, again)
    assert (told["group_size"], told["version"], told["modules_to_not_convert"]) == (64, "gemm", ["lm_head"])
    assert type(again.lm_head) is torch.nn.Linear


ACTIVATIONS = {
    "int8 by row": (lowbit.int8_dynamic_activation_int8_weight(), "int-quantized", TOKEN),
    "int8 by row, asymmetric": (
        lowbit.int8_dynamic_activation_int8_weight(act_mapping_type=ASYMMETRIC),
        "int-quantized",
        TOKEN | {"symmetric": False},
    ),
    "float8 by row": (lowbit.float8_dynamic_activation_float8_weight(), "float-quantized", FLOAT),
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activations_of_compressed_tensors(case, tmp_path):
    config, format, activations = ACTIVATIONS[case]
    model = llama(config)
    told, again = check_saved(model, tmp_path / "model", "compressed-tensors")
    check_answers(model, again)
    assert told["format"] == format and told["config_groups"]["group_0"]["input_activations"] == activations
    assert again.get_submodule(UP).spec == model.get_submodule(UP).spec


def test_activations_by_group_are_float_in_the_file(tmp_path):
    model = llama(lowbit.int8_dynamic_activation_int4_weight(group_size=64))
    told, again = check_saved(model, tmp_path / "model", "compressed-tensors")
    assert told["format"] == "pack-quantized" and told["config_groups"]["group_0"]["input_activations"] is None
    assert again.get_submodule(UP).spec.x_format == "float"


def blocks(name, n, k, generator):
    return float8("block")(name, n, k, generator)


def from_compressed_tensors(format, told, form):
    return "compressed-tensors", settings_of_compressed_tensors(format, told), form


FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
ROUND_TRIPS = {
    "act order": ("gptq", settings_of_gptq(desc_act=True), gptq(desc_act=True)),
    "mxfp4": from_compressed_tensors("mxfp4-pack-quantized", FLOAT4, mxfp4),
    "nvfp4": from_compressed_tensors(
        "nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16}, nvfp4
    ),
    "float8 by block": from_compressed_tensors("float-quantized", BLOCKS, blocks),
    "zero points by row": from_compressed_tensors(
        "naive-quantized",
        weights(8, "channel", symmetric=False),
        integers("naive-quantized", weights(8, "channel", symmetric=False)),
    ),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_files_that_were_read_are_written_again(case, tmp_path):
    format, told, form = ROUND_TRIPS[case]
    write(tmp_path / "model", told, form, num_hidden_layers=1)
    model = read(tmp_path / "model")
    made, again = check_saved(model, tmp_path / "again", format)
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    if format == "gptq":
        assert made["desc_act"] == told["desc_act"]
        assert made["checkpoint_format"] == "gptq_v2"
    else:
        args = {
            name: made["config_groups"]["group_0"]["weights"].get(name) for name in ("strategy", "num_bits", "type")
        }
        assert args == {name: told["config_groups"]["group_0"]["weights"][name] for name in args}


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors"])
def test_experts_have_the_names_of_the_checkpoint(format, tmp_path):
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size=64), head=None)
    lowbit.dequantize_(model.lm_head)
    told, again = check_saved(model, tmp_path / "model", format)
    check_answers(model, again)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    part = "weight_packed" if format == "compressed-tensors" else "qweight"
    experts = [key for key in tensors if "experts" in key and key.endswith(part)]
    assert len(experts) == 12 and f"model.layers.0.block_sparse_moe.experts.3.w2.{part}" in experts
    gate = "model.layers.0.block_sparse_moe.gate"
    assert gate in str({name.replace("\\", "") for name in told.get("dynamic", {})}) + str(
        told.get("ignore", told.get("modules_to_not_convert"))
    )


def test_formats_by_layer(tmp_path):
    model = llama(lowbit.int4_weight_only(group_size=64))
    lowbit.dequantize_(model.model.layers[0].self_attn)
    lowbit.quantize_(
        model,
        lowbit.int8_dynamic_activation_int8_weight(),
        lambda _, name: name.endswith(("q_proj", "k_proj", "v_proj")),
    )
    told, again = check_saved(model, tmp_path / "compressed-tensors", "compressed-tensors")
    check_answers(model, again)
    assert told["format"] == "mixed-precision" and told["ignore"] == ["model.layers.0.self_attn.o_proj"]
    assert [len(group["targets"]) for group in told["config_groups"].values()] == [1, 3]
    lowbit.dequantize_(model.model.layers[0].self_attn)
    lowbit.quantize_(model, intx(8, 32), lambda _, name: name.endswith("q_proj"))
    told, again = check_saved(model, tmp_path / "gptq", "gptq")
    check_answers(model, again)
    assert told["bits"] == 4 and told["lm_head"]
    assert told["dynamic"][r"+:^model\.layers\.0\.self_attn\.q_proj$"] == {"bits": 8, "group_size": 32}
    assert told["dynamic"][r"-:^model\.layers\.0\.self_attn\.o_proj$"] == {}


def test_transformers_reads_the_settings(tmp_path):
    from transformers.quantizers.auto import AutoQuantizationConfig

    for format in ("gptq", "awq"):
        model = llama(lowbit.int4_weight_only(group_size=64))
        lowbit.dequantize_(model.lm_head)
        lowbit.save(model, tmp_path / format, format)
        config = transformers.AutoConfig.from_pretrained(tmp_path / format)
        parsed = AutoQuantizationConfig.from_dict(config.quantization_config)
        assert (parsed.quant_method, parsed.bits, parsed.group_size) == (format, 4, 64)


def test_several_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_files, "_LARGEST", 100_000)
    model = llama(lowbit.int4_weight_only(group_size=64))
    _, again = check_saved(model, tmp_path / "model", "gptq")
    check_answers(model, again)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "model").glob("*.safetensors")}
    assert len(files) > 2 and {key: name for name, held in files.items() for key in held} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(one.nbytes for held in files.values() for one in held.values())


def test_a_tied_head_that_has_codes_is_untied(tmp_path):
    model = llama(lowbit.int4_weight_only(group_size=64), tie_word_embeddings=True)
    assert is_packed(model.lm_head) and not is_packed(model.model.embed_tokens)
    _, again = check_saved(model, tmp_path / "model", "compressed-tensors")
    check_answers(model, again)
    assert not json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"]
    assert model.config.tie_word_embeddings


def test_a_fused_model(tmp_path):
    model = llama(lowbit.int4_weight_only(group_size=64))
    lowbit.fuse(model)
    check_saved(model, tmp_path / "model", "gptq")


REFUSED = {
    "nf4": (
        "gptq",
        lowbit.nf4_weight_only(),
        r"gptq does not hold \S+ \(nf4 g64\): codes must be integers of 2, 3, 4, 8 bits",
    ),
    "no such codes": (
        "compressed-tensors",
        lowbit.nf4_weight_only(),
        r"does not hold \S+ \(nf4 g64\): it has no such codes",
    ),
    "float32 scales": ("gptq", lowbit.int8_weight_only(), r"gptq does not hold \S+ .*its scales are no float16"),
    "bits": ("awq", intx(3, 64), r"awq does not hold \S+ \(int3 g64\): codes must be integers of 4 bits"),
    "head": ("awq", lowbit.int4_weight_only(group_size=64), "awq does not hold lm_head .*float output head"),
    "e2m1": ("compressed-tensors", lowbit.fp4_weight_only(), "it has no such codes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_do_not_fit_are_named_and_nothing_is_written(case, tmp_path):
    format, config, message = REFUSED[case]
    model = llama(config)
    with pytest.raises(ValueError, match=message):
        lowbit.save(model, tmp_path / "model", format)
    assert not [*tmp_path.iterdir()]


def test_models_that_do_not_fit(tmp_path):
    out = tmp_path / "model"

    def refused(model, message, format="gptq"):
        with pytest.raises(ValueError, match=message):
            lowbit.save(model, out, format)

    four = lowbit.int4_weight_only(group_size=64)
    tied = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))
    refused(tied, "model must have layers that lowbit packed, got none")
    lowbit.quantize_(tied, four)
    refused(tied, "embeddings must be float, got model.embed_tokens as int8 g64; lowbit.dequantize_")
    refused(llama(intx(4, 128), intermediate_size=320), "down_proj .*k must be a multiple of the group size, got k=320")
    model = llama(four)
    lowbit.dequantize_(model.lm_head)
    lowbit.dequantize_(model.get_submodule(UP))
    lowbit.quantize_(model, intx(4, 32), lambda _, name: name == UP)
    refused(model, rf"awq does not hold {UP} \(int4 g32\): all layers must have one group size", "awq")
    conv = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    gpt2 = transformers.GPT2LMHeadModel(conv)
    lowbit.quantize_(gpt2, four, head=None)
    refused(gpt2, r"rows of their own for each matrix of transformer.h.0.attn.c_attn")
    sparse = llama(four)
    lowbit.dequantize_(sparse.get_submodule(UP))
    lowbit.sparsify_(sparse, lowbit.block_sparse_weight(blocksize=64), lambda _, name: name == UP)
    refused(sparse, f"layers must be packed or float, got {UP}, a BlockSparseLinear")
    assert not [*tmp_path.iterdir()]


def test_zero_points_that_are_no_integers(tmp_path):
    model = llama(lowbit.int4_weight_only(group_size=64, algorithm=lowbit.HQQ(), mapping_type=ASYMMETRIC))
    for format in ("gptq", "awq", "compressed-tensors"):
        lowbit.dequantize_(model.lm_head)
        with pytest.raises(ValueError, match="zero points must be integers from 0 to 1[56], got "):
            lowbit.save(model, tmp_path / "model", format)


def test_act_order_fits_gptq_alone(tmp_path):
    write(tmp_path / "model", settings_of_gptq(desc_act=True), gptq(desc_act=True), num_hidden_layers=1)
    model = read(tmp_path / "model")
    lowbit.dequantize_(model.lm_head)
    with pytest.raises(ValueError, match="awq does not hold .*act order"):
        lowbit.save(model, tmp_path / "out", "awq")
    with pytest.raises(ValueError, match="compressed-tensors does not hold .*act order"):
        lowbit.save(model, tmp_path / "out", "compressed-tensors")


def test_arguments(tmp_path):
    model = llama(lowbit.int4_weight_only(group_size=64))
    with pytest.raises(ValueError, match="format must be one of compressed-tensors, gptq, awq, gguf, got 'gpt'"):
        lowbit.save(model, tmp_path / "out", "gpt")
    for format, like in (("gguf", None), ("gptq", "model.gguf")):
        with pytest.raises(ValueError, match="like must be a GGUF file for 'gguf', and None for others"):
            lowbit.save(model, tmp_path / "out", format, like=like)
    with pytest.raises(FileExistsError, match="out must be a new folder"):
        lowbit.save(model, tmp_path, "gptq")
    with pytest.raises(TypeError, match="model must be one of transformers for 'gptq', got Sequential"):
        lowbit.save(torch.nn.Sequential(), tmp_path / "out", "gptq")


def test_gguf(tmp_path):
    pytest.importorskip("gguf")
    from gguf_files import write as write_gguf

    from lowbit.huggingface.load_gguf import load_model

    source = write_gguf(tmp_path / "source.gguf", "llama")
    model = load_model(source, fuse=False)
    lowbit.save(model, tmp_path / "again.gguf", "gguf", like=source)
    mine, theirs = decoded(model), decoded(load_model(tmp_path / "again.gguf", fuse=False))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    model = llama(lowbit.int4_weight_only(group_size=64))

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model.config), "save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lowbit.save(model, tmp_path / "out", "gptq")
    assert not [*tmp_path.iterdir()]
