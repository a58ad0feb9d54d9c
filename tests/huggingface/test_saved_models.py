# SPDX-License-Identifier: Apache-2.0
"""Models that quantize_ and others changed after they were made: save_pretrained writes what from_pretrained needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_architectures import tiny_config, tiny_model
from tiny_inputs import SEEN, TOKENS
from tiny_models import LLAMA, MODELS, logits, save
from torch import nn

import lowbit
from lowbit.formats import FORMATS, MappingType, PerGroup, PerRow
from lowbit.huggingface.load_gguf import load_model
from lowbit.quant import quantize
from lowbit.quant.kinds import kind_of
from lowbit.quant.quant_linear import LINEAR
from lowbit.training import BitNetTrainingConfig, Int8WeightOnlyQuantizedTrainingConfig, QATConfig

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

W4A8, INT4, INT8 = lowbit.int8_dynamic_activation_int4_weight(), lowbit.int4_weight_only(32), lowbit.int8_weight_only()
ASYMMETRIC = MappingType.ASYMMETRIC
CONFIGS = [
    *(cls() for cls in FORMATS),
    *(lowbit.intx_weight_only(getattr(torch, f"int{bits}"), 32, mapping_type=ASYMMETRIC) for bits in range(2, 9)),
    lowbit.int8_dynamic_activation_int8_weight(32, act_mapping_type=ASYMMETRIC),
    lowbit.Int8DynamicActivationInt8WeightConfig(granularity=(PerRow(), PerGroup(32))),
    lowbit.Int8DynamicActivationInt4WeightConfig(act_granularity=PerRow(), scale="absmax"),
    lowbit.Float8DynamicActivationFloat8WeightConfig(granularity=(PerRow(), PerGroup(64))),
    lowbit.float_weight(torch.bfloat16),
]  # fmt: skip


def float_model(name: str, folder: Path) -> nn.Module:
    return MODELS[name][0].from_pretrained(save(name, folder))


def formats(model: nn.Module) -> dict[str, str]:
    kinds = (lowbit.QuantLinear, lowbit.QuantEmbedding)
    found = {name: module.spec.name for name, module in model.named_modules() if isinstance(module, kinds)}
    return found | {name: "blocks" for name, module in model.named_modules() if isinstance(module, lowbit.BlockSparseLinear)}


def entry(model: nn.Module) -> dict[str, Any]:
    return model.config.quantization_config.to_dict()


def check_it_comes_back(model: nn.Module, folder: Path) -> nn.Module:
    """Save it, load it by transformers alone, and return what was loaded."""
    wanted = logits(model)
    model.save_pretrained(folder / "packed")
    stored = json.loads((folder / "packed" / "config.json").read_text())["quantization_config"]
    assert stored == entry(model) and stored["quant_method"] == "lowbit"
    loaded, info = type(model).from_pretrained(folder / "packed", output_loading_info=True)
    assert not any(info.values()), info
    assert formats(loaded) == formats(model) and formats(model)
    assert torch.equal(logits(loaded), wanted)
    config = copy.deepcopy(model.config)
    del config.quantization_config
    fresh = type(model)(config).eval()
    lowbit.load(fresh, folder / "packed")  # is such a model, too
    fresh.save_pretrained(folder / "packed again")
    again = type(model).from_pretrained(folder / "packed again")
    assert torch.equal(logits(fresh), wanted) and torch.equal(logits(again), wanted)
    return loaded


@pytest.mark.parametrize("name", ["llama", "tied", "bf16", "gpt2", "bert"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_comes_back_bit_for_bit(config, name, tmp_path):
    model = float_model(name, tmp_path)
    lowbit.quantize_(model, config)
    check_it_comes_back(model, tmp_path)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_entry_packs_the_float_model_alike(config, name, tmp_path):
    model = float_model(name, tmp_path)
    lowbit.quantize_(model, config, head=None if name == "llama" else "int8")
    again = type(model).from_pretrained(tmp_path / "float", quantization_config=lowbit.LowbitConfig.from_dict(entry(model)))
    assert formats(again) == formats(model) and torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "bert"])
def test_the_entry_leaves_a_float_head_float(name, tmp_path):
    model = float_model(name, tmp_path)
    heads = ("lm_head", "cls.predictions.decoder")
    lowbit.quantize_(model, W4A8, lambda module, name: kind_of(module) is LINEAR and name not in heads)
    again = type(model).from_pretrained(tmp_path / "float", quantization_config=lowbit.LowbitConfig.from_dict(entry(model)))
    assert formats(again) == formats(model) and torch.equal(logits(again), logits(model))


def test_the_entry_is_the_one_of_from_pretrained(tmp_path):
    model = float_model("llama", tmp_path)
    for config in (W4A8, lowbit.nf4_weight_only(), lowbit.int4_weight_only(64, mapping_type=ASYMMETRIC)):
        changed = copy.deepcopy(model)
        lowbit.quantize_(changed, config)
        assert entry(changed) == lowbit.LowbitConfig(config).to_dict()
        assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("algorithm", [lowbit.GPTQ(), lowbit.HQQ()], ids=str)
def test_how_codes_were_found_is_not_in_the_entry(algorithm, tmp_path):
    model = float_model("llama", tmp_path)
    batches = [torch.arange(14).view(2, 7)] if isinstance(algorithm, lowbit.GPTQ) else None
    lowbit.quantize_(model, lowbit.int4_weight_only(32, algorithm=algorithm), calibration=batches)
    check_it_comes_back(model, tmp_path)
    mapping = ", mapping_type=MappingType.ASYMMETRIC" if batches is None else ""
    assert entry(model)["config"] == f"int4_weight_only(group_size=32{mapping})"


@pytest.mark.parametrize("name", ["llama", "gpt2", "bf16"])
def test_sparse_models_come_back(name, tmp_path):
    for config in (lowbit.semi_sparse_weight(), lowbit.block_sparse_weight(16, sparsity=0.5)):
        model = float_model(name, tmp_path)
        lowbit.sparsify_(model, config)
        check_it_comes_back(model, tmp_path)
    loaded = type(model).from_pretrained(tmp_path / "packed")
    assert entry(loaded)["config"] == "stored" and set(formats(loaded).values()) == {"blocks"}
    weight = next(module.weight for module in loaded.modules() if isinstance(module, lowbit.BlockSparseLinear))
    assert weight.requires_grad and weight.dtype == loaded.dtype
    with pytest.raises(ValueError, match="LowbitConfig: config must be a configuration to pack a float checkpoint by, got 'stored'"):
        type(model).from_pretrained(tmp_path / "float", quantization_config=lowbit.LowbitConfig("stored"))


TRAINED = {
    "QAT": QATConfig(W4A8),
    "QAT of learned scales": QATConfig(INT4, learned_scales=True),
    "ternary": BitNetTrainingConfig(),
    "int8 weights": Int8WeightOnlyQuantizedTrainingConfig(),
}


@pytest.mark.parametrize("training", TRAINED.values(), ids=TRAINED)
def test_what_training_ends_in_comes_back(training, tmp_path):
    model = float_model("llama", tmp_path)
    lowbit.quantize_(model, training)
    assert not hasattr(model.config, "quantization_config")
    end = type(training)(training.base_config, step="convert") if isinstance(training, QATConfig) else type(training)(step="convert")
    lowbit.quantize_(model, end)
    check_it_comes_back(model, tmp_path)


def linear_in(*parts: str) -> Callable[[nn.Module, str], bool]:
    return lambda module, name: isinstance(module, nn.Linear) and any(part in name for part in parts)


def test_several_calls_for_parts_are_one_entry(tmp_path):
    model = float_model("llama", tmp_path)
    lowbit.quantize_(model, INT4, linear_in("mlp"))
    check_it_comes_back(model, tmp_path)
    lowbit.quantize_(model, W4A8, linear_in("q_proj", "k_proj"))
    lowbit.quantize_(model, lowbit.nf4_weight_only(), lambda module, name: name == "model.embed_tokens")
    lowbit.sparsify_(model, lowbit.block_sparse_weight(16), linear_in("o_proj"))
    loaded = check_it_comes_back(model, tmp_path)
    assert entry(loaded)["config"] == "int4_weight_only(group_size=32)" and "head" not in entry(loaded)
    attention = {f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"}
    assert entry(loaded)["plan"].keys() == {*attention, "model.embed_tokens", "lm_head"}
    assert entry(loaded)["plan"]["lm_head"] is None
    assert entry(loaded)["plan"]["model.layers.0.self_attn.v_proj"] is None
    assert entry(loaded)["plan"]["model.layers.0.self_attn.o_proj"] == "stored"
    lowbit.quantize_(loaded, INT8, linear_in("v_proj", "lm_head"))  # a model that from_pretrained made
    assert loaded.hf_quantizer.quantization_config is loaded.config.quantization_config
    assert entry(loaded)["head"] == str(INT8)
    check_it_comes_back(loaded, tmp_path)


def test_only_a_table_or_only_a_head_is_packed(tmp_path):
    for part in ("model.embed_tokens", "lm_head"):
        for name in ("llama", "tied"):
            model = float_model(name, tmp_path)
            lowbit.quantize_(model, INT8, lambda module, name, part=part: name == part)
            assert entry(model)["plan"] == {part: str(INT8)}
            check_it_comes_back(model, tmp_path)


def test_tables_that_were_resized_come_back(tmp_path):
    for name in ("llama", "tied", "gpt2", "bert"):
        for size in (101, 64):
            model = float_model(name, tmp_path)
            model.resize_token_embeddings(size)
            lowbit.quantize_(model, W4A8)
            loaded = check_it_comes_back(model, tmp_path)
            assert logits(loaded).shape[-1] == size


def test_a_head_that_is_no_longer_tied_comes_back_without_a_warning(tmp_path, caplog):
    for name in ("tied", "gpt2", "bert"):
        model = float_model(name, tmp_path)
        lowbit.quantize_(model, INT8, head=None)
        loaded = check_it_comes_back(model, tmp_path)
        assert type(loaded.get_output_embeddings()) is lowbit.QuantLinear
        assert type(loaded.get_input_embeddings()) is nn.Embedding
    assert "tie" not in caplog.text


def tables(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("embed_tokens")]


T5 = dict(vocab_size=97, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
SEAMLESS = dict(vocab_size=97, hidden_size=64, max_position_embeddings=64, pad_token_id=0, **dict.fromkeys(("encoder_layers", "decoder_layers", "speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers"), 2))


@pytest.mark.parametrize("config", [INT4, INT8], ids=str)
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "SeamlessM4TForTextToText"])
def test_weights_of_which_some_are_untied_come_back(name, config, tmp_path):
    """A head and three tables are one weight: all tables are packed that can be."""
    cls, ids = getattr(transformers, name), torch.arange(14).view(2, 7)
    torch.manual_seed(0)
    model = cls(cls.config_class(**(T5 if "T5" in name else SEAMLESS))).eval()
    lowbit.quantize_(model, config)
    model.save_pretrained(tmp_path)
    loaded, info = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert formats(loaded) == formats(model) and not any(info.values())
    with torch.no_grad():
        assert torch.equal(loaded(ids, decoder_input_ids=ids).logits, model(ids, decoder_input_ids=ids).logits)
    shared = [len({id(module.weight) for module in (of.lm_head, of.shared, *tables(of))}) for of in (model, loaded)]
    assert shared[0] == shared[1] < 4


def test_dequantize_takes_the_entry_out(tmp_path):
    model = float_model("llama", tmp_path)
    lowbit.quantize_(model, W4A8)
    loaded = check_it_comes_back(model, tmp_path)
    for changed in (model, loaded):
        lowbit.dequantize_(changed)
        assert not hasattr(changed.config, "quantization_config") and not hasattr(changed, "hf_quantizer")
        changed.save_pretrained(tmp_path / "again")
        again = type(model).from_pretrained(tmp_path / "again")
        assert not formats(again) and torch.equal(logits(again), logits(changed))


def test_an_interrupted_call_leaves_an_entry_of_what_is_packed(tmp_path, monkeypatch):
    model, packed = float_model("llama", tmp_path), []

    def pack_three(*args: Any) -> Any:
        if len(packed) == 3:
            raise KeyboardInterrupt
        packed.append(args)
        return pack_weight(*args)

    pack_weight = quantize.pack_weight
    monkeypatch.setattr(quantize, "pack_weight", pack_three)
    with pytest.raises(KeyboardInterrupt):
        lowbit.quantize_(model, W4A8)
    assert len(formats(model)) == 3
    check_it_comes_back(model, tmp_path)


def test_a_refused_call_leaves_no_entry(tmp_path):
    model = float_model("llama", tmp_path)
    with torch.no_grad():
        model.lm_head.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        lowbit.quantize_(model, W4A8)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_models_made_of_one_config_have_entries_of_their_own(name, tmp_path):
    cls, config = MODELS[name][0], copy.deepcopy(MODELS[name][1])
    first, second, third = (cls(config).eval() for _ in range(3))
    lowbit.quantize_(first, W4A8)
    assert not hasattr(config, "quantization_config") and second.config is config
    assert all(module.config is first.config for module in first.modules() if hasattr(module, "config"))
    lowbit.quantize_(third, INT8)
    assert entry(first)["config"] != entry(third)["config"]
    lowbit.dequantize_(third)
    check_it_comes_back(first, tmp_path)
    second.save_pretrained(tmp_path / "second")
    assert "quantization_config" not in (tmp_path / "second" / "config.json").read_text()
    own = first.config
    lowbit.quantize_(first, INT8, lambda module, name: type(module) is nn.Embedding and "position" not in name)
    assert first.config is own


def test_a_part_of_a_model_marks_the_whole(tmp_path):
    model = float_model("llama", tmp_path)
    lowbit.quantize_(model.model.layers[0], INT4)
    assert entry(model) == lowbit.LowbitConfig(INT4).to_dict()
    check_it_comes_back(model, tmp_path)
    lowbit.quantize_(model.model, W4A8, linear_in("layers.1"))
    check_it_comes_back(model, tmp_path)
    lowbit.quantize_(model, INT8, linear_in("lm_head"))  # the whole is seen
    lowbit.dequantize_(model.model)
    assert formats(model) == {"lm_head": "int8 per-channel"}
    check_it_comes_back(model, tmp_path)
    lowbit.dequantize_(model)
    assert not hasattr(model.config, "quantization_config")


def test_a_model_in_a_module_of_the_user(tmp_path):
    net = nn.ModuleDict({"bert": transformers.BertModel(copy.deepcopy(MODELS["bert"][1])).eval(), "head": nn.Linear(48, 3)})
    lowbit.quantize_(net, W4A8)
    net["bert"].save_pretrained(tmp_path)
    loaded, ids = transformers.AutoModel.from_pretrained(tmp_path), torch.arange(7)[None]
    assert {f"bert.{name}" for name in formats(loaded)} == formats(net).keys() - {"head"}
    assert torch.equal(loaded(ids).last_hidden_state, net["bert"](ids).last_hidden_state)


def test_a_model_of_models_and_each_of_them(tmp_path):
    text = transformers.LlamaConfig(**LLAMA)
    vision = transformers.CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96)).eval()
    lowbit.quantize_(model, INT4)
    check_it_comes_back(model, tmp_path)
    model.model.language_model.save_pretrained(tmp_path / "text")
    loaded, ids = transformers.LlamaModel.from_pretrained(tmp_path / "text"), torch.arange(7)[None]
    assert formats(loaded) and torch.equal(loaded(ids).last_hidden_state, model.model.language_model(ids).last_hidden_state)
    lowbit.dequantize_(model)
    model.save_pretrained(tmp_path / "float again")
    assert "quantization_config" not in (tmp_path / "float again" / "config.json").read_text()


@pytest.mark.parametrize("first", ["quantize_", "peft"])
def test_merged_adapters_come_back(first, tmp_path):
    peft = pytest.importorskip("peft")
    model = float_model("llama", tmp_path)
    if first == "quantize_":
        lowbit.quantize_(model, W4A8)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if first == "peft":
        lowbit.quantize_(lora, W4A8)
    assert entry(model) == lowbit.LowbitConfig(W4A8).to_dict()
    merged = lora.merge_and_unload()
    assert not any("base_layer" in name for name in entry(merged)["plan"])
    check_it_comes_back(merged, tmp_path)


def test_weights_that_transformers_split_are_saved_apart(tmp_path):
    config = transformers.HrmTextConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2)
    torch.manual_seed(0)
    made = transformers.HrmTextForCausalLM(config).eval()
    made.save_pretrained(tmp_path / "float")
    assert any("gate_up_proj" in name for name in safetensors.load_file(tmp_path / "float" / "model.safetensors"))
    for model in (made, transformers.HrmTextForCausalLM.from_pretrained(tmp_path / "float")):
        lowbit.quantize_(model, INT4)
        check_it_comes_back(model, tmp_path)


def test_a_model_of_bitsandbytes_whose_layers_were_replaced_comes_back(tmp_path):
    pytest.importorskip("bitsandbytes")
    folder = save("llama", tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu", dtype=torch.float32)
    lowbit.peers.bitsandbytes.replace_linear4bit(model)
    assert not hasattr(model, "hf_quantizer") and entry(model)["config"].startswith("nf4_weight_only")
    check_it_comes_back(model, tmp_path)


@pytest.mark.parametrize("type", ["Q4_0", "Q4_K", "Q6_K", "MXFP4"])
@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "gemma3"])
def test_a_model_of_a_gguf_file_comes_back(name, type, tmp_path):
    files = pytest.importorskip("gguf_files")
    path = files.write(tmp_path / "file.gguf", name, type)
    for more in ({}, {"attn_implementation": "sdpa", "fuse": False}):
        model = load_model(path, activations="float", **more)
        assert entry(model) == lowbit.LowbitConfig("gguf", activations="float", fuse=not more).to_dict()
        model.save_pretrained(tmp_path / "packed")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation=more.get("attn_implementation", "lowbit"))
        assert formats(loaded) == formats(model) and torch.equal(logits(loaded), logits(model))
        lowbit.dequantize_(model)
        assert not hasattr(model.config, "quantization_config")


def test_a_fused_model_comes_back(tmp_path):
    model = float_model("llama", tmp_path)
    lowbit.quantize_(model, W4A8, linear_in("q_proj", "k_proj", "v_proj", "mlp"))
    wanted = logits(model)
    assert lowbit.fuse(model)
    lowbit.quantize_(model, INT8, linear_in("o_proj"))
    model.save_pretrained(tmp_path / "packed")
    loaded = type(model).from_pretrained(tmp_path / "packed")
    assert formats(loaded) == formats(model) and len(formats(model)) == 14
    assert (logits(loaded) - logits(model)).abs().max() < 1e-5 * wanted.abs().max()  # attention of other kernels


def test_a_sentence_transformer_comes_back(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    save("bert", tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(92))]
    (tmp_path / "float" / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "float" / "vocab.txt")).save_pretrained(tmp_path / "float")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "float"), device="cpu")
    lowbit.quantize_(model, W4A8)
    wanted = model.encode(["word1 word7 word8", "word3"])
    model.save(str(tmp_path / "packed"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "packed"), device="cpu")
    assert formats(loaded) == formats(model) and formats(model)
    assert (loaded.encode(["word1 word7 word8", "word3"]) == wanted).all()


@torch.no_grad()
def test_a_packed_weight_that_its_model_renames(tmp_path: Path) -> None:
    """Inkling 2 saves `k_sconv.weight_proj.weight` without its last word, and not the layout beside it; in shards the
    two may be apart."""
    model = tiny_model("Inkling2ForCausalLM", tiny_config(transformers.Inkling2TextConfig))
    lowbit.quantize_(model, INT8)
    wanted = model(TOKENS, attention_mask=SEEN).logits[SEEN.bool()]
    model.save_pretrained(tmp_path / "first")
    for folder in ("first", "again", "shards"):
        loaded, info = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()) and formats(loaded) == formats(model), info
        torch.testing.assert_close(loaded(TOKENS, attention_mask=SEEN).logits[SEEN.bool()], wanted)
        loaded.save_pretrained(tmp_path / "again")
        loaded.save_pretrained(tmp_path / "shards", max_shard_size=2000)
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 2
