# SPDX-License-Identifier: Apache-2.0
"""The output head of a language model has 8 bits at least, and shares its weight with its table, at all entrances."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowbit

transformers = pytest.importorskip("transformers")
W4A8 = lowbit.int8_dynamic_activation_int4_weight(group_size=32)
FEWER = {
    "int4 g32 int8-activations": (W4A8, "int8 g32 int8-activations"),
    "int4 g128": (lowbit.int4_weight_only(group_size=128), "int8 g128"),
    "nf4": (lowbit.nf4_weight_only(group_size=64), "int8 g64"),
    "int3": (lowbit.intx_weight_only(torch.int3, 32), "int8 g32"),
    "int4 per channel": (lowbit.intx_weight_only(torch.int4, None), "int8 per-channel"),
}


def llama(tied: bool = True) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def formats(model: nn.Module) -> tuple[str | None, str | None, str]:
    """Of the head, the table and another layer."""
    layers = model.lm_head, model.model.embed_tokens, model.model.layers[0].mlp.up_proj
    return tuple(layer.spec.name if hasattr(layer, "spec") else None for layer in layers)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config, wanted", FEWER.values(), ids=FEWER)
def test_it_keeps_8_bits_and_its_table_the_same_weight(config, wanted, tied):
    model, exact = llama(tied), llama(tied)
    report = lowbit.quantize_(model, config)
    head, table, other = formats(model)
    assert head == wanted and table == (wanted.removesuffix(" int8-activations") if tied else None)
    assert other == config.spec(torch.float32).name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    rows = {row.layer: row for row in report.rows}
    assert rows["lm_head"].bytes_after + (rows["model.embed_tokens"].bytes_after if tied else 0) == model.lm_head.weight.nbytes
    x = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(x), exact.lm_head(x), rtol=0, atol=0.02 * float(exact.lm_head(x).abs().max()))
        ids = torch.arange(14).view(2, 7)
        by_hand = exact.model.embed_tokens(ids)
        torch.testing.assert_close(model.model.embed_tokens(ids), by_hand, rtol=0, atol=0.01 * float(by_hand.abs().max()))
        assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 10)


@pytest.mark.parametrize("config", [lowbit.int8_weight_only(), lowbit.float8_weight_only(), lowbit.int8_dynamic_activation_int8_weight()])
@pytest.mark.parametrize("tied", [True, False])
def test_8_bits_are_those_of_the_other_layers(config, tied, tmp_path):
    model = llama(tied)
    model.save_pretrained(tmp_path / "float")
    lowbit.quantize_(model, config)
    name = config.spec(torch.float32).name
    assert formats(model)[0] == formats(model)[2] == name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied == (formats(model)[1] is not None)
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=lowbit.LowbitConfig(config))
    report = lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", config)
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        for other in (loaded, type(model).from_pretrained(tmp_path / "packed")):
            assert formats(other) == formats(model) and torch.equal(other(ids).logits, model(ids).logits)
    for told in (report, loaded.hf_quantizer.report):
        assert "modules_to_not_convert" not in str(told)
        assert {row.layer for row in told.quantized} >= {"lm_head"}


def test_one_argument_takes_it_back_or_gives_another_format():
    model = llama()
    report = lowbit.quantize_(model, W4A8, head=None)
    assert formats(model) == ("int4 g32 int8-activations", None, "int4 g32 int8-activations")
    assert next(row for row in report.rows if row.layer == "lm_head").note.startswith("untied from")
    model = llama()
    lowbit.quantize_(model, W4A8, head="intx_weight_only(weight_dtype=torch.int6, granularity=PerGroup(group_size=32))")
    assert formats(model) == ("int6 g32", "int6 g32", "int4 g32 int8-activations")


def test_a_filter_decides_which_of_the_two_are_taken():
    model = llama()
    lowbit.quantize_(model, W4A8, lambda module, name: name == "lm_head")
    assert formats(model) == ("int8 g32 int8-activations", None, None)
    model = llama()
    lowbit.quantize_(model, W4A8, lambda module, name: name in ("lm_head", "model.embed_tokens"))
    assert formats(model)[:2] == ("int8 g32 int8-activations", "int8 g32")


@pytest.mark.parametrize("config", [W4A8, lowbit.int8_weight_only(), lowbit.float_weight(torch.bfloat16)], ids=str)
def test_none_is_the_rule_of_other_layers(config, tmp_path):
    model = llama(tied=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=lowbit.LowbitConfig(config, head=None))
    lowbit.quantize_(model, config, head=None)
    assert formats(loaded) == formats(model) == (config.spec(torch.float32).name, None, config.spec(torch.float32).name)


def test_the_last_module_of_a_model_without_a_head_is_packed_too(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_labels=9
    )
    cls = transformers.LlamaForSequenceClassification
    cls(config).save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path, quantization_config=lowbit.LowbitConfig("int8_weight_only"))
    assert isinstance(loaded.score, lowbit.QuantLinear) and not loaded.hf_quantizer.report.skipped


def test_a_table_that_changes_in_each_call_keeps_its_float_weight():
    model = llama()
    model.model.embed_tokens.max_norm = 1.0
    lowbit.quantize_(model, W4A8)
    assert formats(model)[:2] == ("int8 g32 int8-activations", None)


def test_a_calibration_serves_the_other_layers():
    model = llama()
    calibration = lowbit.calibrate(model, [torch.arange(14).view(2, 7)], hessian=True)
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32, algorithm=lowbit.GPTQ()), calibration=calibration)
    assert formats(model) == ("int8 g32", "int8 g32", "int4 g32")
    model = llama()
    lowbit.quantize_(model, W4A8, calibration=[torch.arange(14).view(2, 7)])
    assert formats(model)[0] == "int8 g32 int8-activations"


def test_a_state_dict_comes_back_into_a_model_on_the_meta_device(tmp_path):
    model = llama()
    lowbit.quantize_(model, W4A8)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        fresh = llama()
    lowbit.load(fresh, tmp_path / "model.pt")
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert formats(fresh) == formats(model) and torch.equal(fresh.eval()(ids).logits, model(ids).logits)


def test_a_module_without_a_head_is_not_asked():
    model = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 10))
    model[0].weight = model[1].weight
    report = lowbit.quantize_(model, W4A8)
    assert [row.format for row in report.quantized] == ["int4 g32 int8-activations"]


@pytest.mark.parametrize("head, error", [("int9", ValueError), (8, TypeError), (torch.int8, TypeError)])
def test_a_head_that_is_no_format_is_refused_before_anything_changes(head, error):
    model = llama()
    with pytest.raises(error, match="quantize_: head must be 'int8', None or a configuration"):
        lowbit.quantize_(model, W4A8, head=head)
    assert formats(model) == (None, None, None)


@pytest.mark.parametrize("tied", [True, False])
def test_from_pretrained_does_the_same(tied, tmp_path):
    model = llama(tied)
    model.save_pretrained(tmp_path / "float")
    cls = transformers.LlamaForCausalLM
    loaded = cls.from_pretrained(tmp_path / "float", quantization_config=lowbit.LowbitConfig(W4A8))
    lowbit.quantize_(model, W4A8)
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert formats(loaded) == formats(model) and torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(cls.from_pretrained(tmp_path / "packed")(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "options, head",
    [
        ({"head": None}, None),  # as any other layer: tied ones stay float
        ({"head": "int4_weight_only(group_size=32)"}, "int4 g32"),
        ({"modules_to_not_convert": ["lm_head"]}, None),
        ({"plan": {"model.embed_tokens": lowbit.int8_weight_only()}}, "int8 per-channel"),
        ({"plan": {"model.embed_tokens": None}}, None),
        ({"embeddings": lowbit.int8_weight_only()}, "int8 per-channel"),
    ],
)
def test_what_else_is_said_of_a_head_stands_above(options, head, tmp_path):
    llama().save_pretrained(tmp_path)
    config = lowbit.LowbitConfig(W4A8, **options)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert formats(loaded)[:2] == (head, head)
    assert lowbit.LowbitConfig.from_dict(config.to_dict()) == config
    assert ("head" in config.to_dict()) == ("head" in options)


@pytest.mark.parametrize("tied", [True, False])
def test_tables_are_resized_before_they_are_packed(tied):
    import lowbit.huggingface.quantizer  # noqa: F401  # an installed lowbit does so by its entry point

    model = llama(tied)
    lowbit.quantize_(model, W4A8)
    assert model.resize_token_embeddings() is model.resize_token_embeddings(97) is model.model.embed_tokens
    with pytest.raises(ValueError, match=r"must be float, got .*lm_head as int8 g32.*; resize the model before it is quantized"):
        model.resize_token_embeddings(101)
    assert model.model.embed_tokens.num_embeddings == model.lm_head.out_features == model.config.vocab_size == 97
    model = llama(tied)
    model.resize_token_embeddings(101)
    lowbit.quantize_(model, W4A8)
    assert model(torch.arange(14).view(2, 7)).logits.shape == (2, 7, 101)


def small(name: str) -> transformers.PreTrainedModel:
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    grouped = sizes | dict(num_key_value_heads=2, head_dim=16)
    torch.manual_seed(0)
    if name == "gemma":
        return transformers.GemmaForCausalLM(transformers.GemmaConfig(**grouped)).eval()
    if name == "gemma2":
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**grouped)).eval()
    if name == "gemma3":
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**grouped)).eval()
    if name == "phi":
        return transformers.PhiForCausalLM(transformers.PhiConfig(**sizes)).eval()
    if name == "opt":  # whose table is narrower than the model
        config = transformers.OPTConfig(
            vocab_size=97, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
        )
        return transformers.OPTForCausalLM(config).eval()
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)
    return transformers.BloomForCausalLM(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "phi", "opt", "bloom"])
def test_models_of_each_kind_are_loaded_packed_and_saved(name, dtype, tmp_path):
    """Gemma multiplies the rows of its table, Phi's head has a bias, a norm follows the table of Bloom."""
    small(name).to(dtype).save_pretrained(tmp_path / "float")
    model = type(small(name)).from_pretrained(tmp_path / "float", dtype=dtype)  # whose rotary tables stay float32
    ids = torch.arange(3, 17).view(2, 7)
    config = lowbit.intx_weight_only(torch.int7, 32)
    with torch.no_grad():
        wanted = model(ids).logits.float()
        loaded = type(model).from_pretrained(tmp_path / "float", dtype=dtype, quantization_config=lowbit.LowbitConfig(config))
        assert isinstance(loaded.get_output_embeddings(), lowbit.QuantLinear)
        tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert tied == model.config.tie_word_embeddings == isinstance(loaded.get_input_embeddings(), lowbit.QuantEmbedding)
        got = loaded(ids).logits
        assert (got.float() - wanted).norm() < 0.05 * wanted.norm()
        lowbit.quantize_(model, config)
        assert torch.equal(model(ids).logits, got)
        loaded.save_pretrained(tmp_path / "packed")
        again = type(model).from_pretrained(tmp_path / "packed", dtype=dtype)
        assert torch.equal(again(ids).logits, got)
        if dtype is torch.float32:  # a model that is cast has its rotary tables in bfloat16 too
            with torch.device("meta"):
                fresh = small(name)
            lowbit.load(fresh, tmp_path / "packed")
            assert torch.equal(fresh.eval()(ids).logits, got)
        lowbit.dequantize_(again)
        assert (again(ids).logits.float() - wanted).norm() < 0.05 * wanted.norm()
