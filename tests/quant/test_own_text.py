# SPDX-License-Identifier: Apache-2.0
"""quantize_ without data: text that a model writes itself, random words for encoders, models that need data; and batches
of text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant.calibration_cost import tell_cost
from lowbit.quant.own_text import TEXTS, _drawn, own_text

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
W4A8 = lowbit.int8_dynamic_activation_int4_weight(32)
TOKENS = 40


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lowbit.quant.own_text.TOKENS == 192
    monkeypatch.setattr("lowbit.quant.own_text.TOKENS", TOKENS)


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config).eval()


def bert(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    return transformers.BertModel(transformers.BertConfig(**SIZES, **options)).eval()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


def test_a_language_model_writes_the_same_text_each_time_and_changes_nothing():
    model = llama().train()
    before, weights, seed = state(model), [*model.parameters()], torch.get_rng_state()
    first, again = own_text(model), own_text(model)
    text = torch.cat([batch["input_ids"] for batch in first])
    assert text.shape == (TEXTS, TOKENS) and text.dtype == torch.int64
    assert torch.equal(text, torch.cat([batch["input_ids"] for batch in again]))
    assert len(text[:, 0].unique()) > 4 and len(text.unique(dim=0)) == TEXTS
    assert torch.equal(torch.get_rng_state(), seed) and model.training
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(module) is not lowbit.QuantLinear for module in model.modules())


def test_the_text_follows_the_models_own_odds():
    """A model that always says one word writes it."""
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.ones(97, 64))
        model.lm_head.weight.copy_(torch.nn.functional.one_hot(torch.tensor(42), 97)[:, None] * torch.ones(64))
        model.lm_head.weight.mul_(model.model(torch.zeros(1, 1, dtype=torch.int64)).last_hidden_state.sign().mean(1) * 9)
    text = torch.cat([batch["input_ids"] for batch in own_text(model)])
    assert bool((text[:, 1:] == 42).all()) and len(text[:, 0].unique()) > 4


def test_words_are_drawn_by_their_odds():
    odds = torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(40000, 4)
    words = _drawn(odds.cumsum(-1, dtype=torch.float64), torch.Generator().manual_seed(3))
    found = torch.bincount(words, minlength=4) / 40000
    assert found[1] == 0 and (found - odds[0]).abs().max() < 0.01


@pytest.mark.parametrize("mapping", [lowbit.MappingType.SYMMETRIC, lowbit.MappingType.ASYMMETRIC])
def test_quantize_takes_gptq_on_it_where_the_format_has_it(mapping):
    config = lowbit.int8_dynamic_activation_int4_weight(32, mapping_type=mapping)
    model, plain, by_hand = llama(), llama(), llama()
    text = own_text(model)
    with torch.no_grad():
        wanted = [model(**batch).logits for batch in text]
    report = lowbit.quantize_(model, config, calibration="self")
    lowbit.quantize_(plain, config)
    seen = lowbit.calibrate(by_hand, "self", hessian=True)
    lowbit.quantize_(by_hand, lowbit.int8_dynamic_activation_int4_weight(32, mapping_type=mapping, algorithm=lowbit.GPTQ()), calibration=seen)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), by_hand.state_dict().values(), strict=True))
    assert "calibrated on 16 x 40 tokens that the model wrote by itself" in report.notes
    assert type(model.lm_head) is lowbit.QuantLinear and model.lm_head.spec.format == "int8"

    @torch.no_grad()
    def error(of: nn.Module) -> float:
        return sum(float((of(**batch).logits - logits).square().sum()) for batch, logits in zip(text, wanted, strict=True))

    assert error(model) < 0.8 * error(plain)


def test_calibrate_takes_self_too():
    seen = lowbit.calibrate(llama(), "self", hessian=True)
    assert seen.layers["model.layers.0.self_attn.q_proj"].rows == TEXTS * TOKENS
    attention = [seen.layers[f"model.layers.1.self_attn.{name}_proj"] for name in "qkv"]
    assert attention[0] is attention[1] is attention[2]


def test_an_encoder_is_given_random_words_within_its_positions():
    model, plain = bert(max_position_embeddings=24), bert(max_position_embeddings=24)
    seed = torch.get_rng_state()
    report = lowbit.quantize_(model, W4A8, calibration="self")
    assert torch.equal(torch.get_rng_state(), seed)
    assert "calibrated on 16 x 23 tokens drawn at random from its vocabulary" in report.notes
    damped = lowbit.int8_dynamic_activation_int4_weight(32, algorithm=lowbit.GPTQ(damping=1.0))
    lowbit.quantize_(plain, damped, calibration=lowbit.calibrate(plain, "self", hessian=True))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def needing_data() -> list[tuple[nn.Module, str]]:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vit = transformers.ViTModel(transformers.ViTConfig(**small, image_size=32, patch_size=16))
    whisper = transformers.WhisperConfig(
        vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    t5 = transformers.T5Config(vocab_size=60, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    clip = transformers.CLIPConfig(text_config=small, vision_config=small | {"image_size": 32, "patch_size": 16})
    return [
        (vit, "ViTModel takes pixel_values, and needs data"),
        (transformers.WhisperForConditionalGeneration(whisper), "takes input_features, and needs data"),
        (transformers.T5ForConditionalGeneration(t5), "has an encoder and a decoder, and needs data"),
        (transformers.CLIPModel(clip), "CLIPModel .*needs data"),
        (nn.Sequential(nn.Linear(64, 8)), "Sequential is no model of transformers that takes input_ids, and needs data"),
    ]


def test_models_that_need_data_say_so_and_stay_as_they_are(subtests):
    for model, text in needing_data():
        with subtests.test(text):
            with pytest.raises(ValueError, match=f"calibration='self': .*{text}"):
                lowbit.quantize_(model, lowbit.int4_weight_only(32), calibration="self")
            assert not any(isinstance(module, lowbit.QuantLinear) for module in model.modules())


def test_formats_without_a_use_and_models_without_weights_or_finite_logits_are_refused():
    with pytest.raises(ValueError, match="calibration must be None for formats that neither search for scales nor use GPTQ, got int8"):
        lowbit.quantize_(llama(), lowbit.int8_weight_only(), calibration="self")
    with pytest.raises(ValueError, match="weights of LlamaForCausalLM must be loaded, got the meta device"), torch.device("meta"):
        lowbit.quantize_(llama(), W4A8, calibration="self")
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits of LlamaForCausalLM must be finite, got inf or nan"):
        lowbit.quantize_(model, W4A8, calibration="self")
    with pytest.raises(TypeError, match="or 'self', got str"):
        lowbit.quantize_(model, W4A8, calibration="Self")
    assert not any(isinstance(module, lowbit.QuantLinear) for module in model.modules())


def test_a_model_with_packed_layers_writes_as_it_is():
    model = llama()
    only = lambda module, name: name.endswith("down_proj")  # noqa: E731
    others = lambda module, name: type(module) is nn.Linear and name.startswith("model")  # noqa: E731
    lowbit.quantize_(model, lowbit.int8_weight_only(), only)
    lowbit.quantize_(model, W4A8, others, calibration="self")
    assert model.model.layers[0].mlp.up_proj.spec.format == "int4"


def test_the_cost_is_told_before_it_starts(capsys, monkeypatch):
    lowbit.quantize_(llama(), W4A8, calibration="self")
    assert "takes about" not in capsys.readouterr().err
    monkeypatch.setattr("lowbit.quant.calibration_cost.TOLD_FROM_S", 0.0)
    lowbit.quantize_(llama(), W4A8, calibration="self")
    assert "quantize_: calibration='self' takes about 0 s, and at most 0.0 GB beside the model" in capsys.readouterr().err
    assert callable(tell_cost)


def words(text: str) -> dict[str, list[int]]:
    """A tokenizer of bytes."""
    return {"input_ids": [number % 97 for number in text.encode()], "attention_mask": [1] * len(text)}


TEXT = "The river froze before the first snow fell. " * 30


@pytest.mark.parametrize(
    "batches",
    [
        [TEXT],
        [[TEXT[:700], TEXT[700:]]],
        ({"text": part, "label": 1} for part in (TEXT[:100], TEXT[100:])),
        [words(TEXT[:640]), words(TEXT[640:])],
        torch.utils.data.DataLoader([{"text": TEXT[:600]}, {"text": TEXT[600:]}], batch_size=2),
    ],
    ids=["strings", "list of strings", "rows with text", "rows with tokens", "DataLoader"],
)
def test_batches_may_be_text_or_rows_of_a_dataset(batches):
    seen = lowbit.calibrate(llama(), batches, tokenizer=words)
    assert {layer.rows for layer in seen.layers.values()} == {len(TEXT)}


def test_text_is_cut_into_windows_and_needs_a_tokenizer():
    lengths = []
    model = llama()
    model.register_forward_pre_hook(lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    lowbit.quantize_(model, W4A8, calibration=[TEXT], tokenizer=words)
    assert lengths == [512, 512, len(TEXT) - 1024]
    with pytest.raises(ValueError, match="tokenizer must be given for batches of text, got None and 'The river"):
        lowbit.quantize_(llama(), W4A8, calibration=[TEXT])
    with pytest.raises(ValueError, match="tokenizer must be None without calibration=texts, got calibration=None"):
        lowbit.quantize_(llama(), W4A8, tokenizer=words)


def test_experts_take_gptq_by_their_own_inputs():
    torch.manual_seed(1)
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(config).eval()
    plain = copy.deepcopy(model)
    text = own_text(model)
    experts = [name for name, module in model.named_modules() if name.endswith("experts")]
    report = lowbit.quantize_(model, W4A8, calibration="self")
    gptq = lowbit.int8_dynamic_activation_int4_weight(32, algorithm=lowbit.GPTQ())
    lowbit.quantize_(plain, gptq, lambda module, name: name in experts, calibration=lowbit.calibrate(plain, text, hessian=True))
    assert {row.format for row in report.quantized if "experts" in row.layer} == {"int4 g32 int8-activations"}
    for name in experts:
        one, other = (of.get_submodule(name).state_dict() for of in (model, plain))
        assert all(torch.equal(one[key], other[key]) for key in one)
