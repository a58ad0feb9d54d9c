# SPDX-License-Identifier: Apache-2.0
"""Whisper, BART and models like them: encoder and decoder in one call each, beside the same models as they were."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit

transformers = pytest.importorskip("transformers")

from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache  # noqa: E402

from lowbit.ops.run_program import KeptProgram  # noqa: E402
from lowbit.quant.fused import unfuse  # noqa: E402

LAYERS, FRAMES = {"encoder_layers": 3, "decoder_layers": 2}, 60
SIZES = LAYERS | dict(
    vocab_size=99, d_model=64, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
    decoder_ffn_dim=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
)  # fmt: skip
SOUND = {"num_mel_bins": 16, "max_source_positions": FRAMES // 2, "max_target_positions": 64}
TEXT = {"max_position_embeddings": 64, "forced_eos_token_id": None}
MODELS = {
    "Whisper": ("WhisperForConditionalGeneration", SOUND),
    "Bart": ("BartForConditionalGeneration", TEXT),
    "MBart": ("MBartForConditionalGeneration", TEXT),
    "Marian": ("MarianMTModel", TEXT),
    "M2M100": ("M2M100ForConditionalGeneration", TEXT),
}
CONFIGS = {
    "int8": lowbit.int8_weight_only(),
    "w8a8": lowbit.int8_dynamic_activation_int8_weight(group_size=32),
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
}


def made(name: str = "Whisper", config: str = "int8", **more: Any) -> nn.Module:
    cls, settings = MODELS[name]
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(**SIZES | settings | more)
    model = getattr(transformers, cls)._from_config(settings, attn_implementation="lowbit").eval()
    for parameter in model.parameters():  # norms are made of ones, biases of zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    given = model.generation_config
    given.eos_token_id = given.forced_eos_token_id = None
    given.suppress_tokens = given.begin_suppress_tokens = given.max_length = None
    lowbit.quantize_(model, CONFIGS[config])
    return model


def given_to(model: nn.Module, batch: int = 2, long: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(batch, 16, FRAMES * (2 if long else 1), generator=generator)}
    ids = torch.randint(4, 90, (batch, 12), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(12) < torch.tensor([[7], [12]])[:batch]).long()}


def tokens(*shape: int) -> Tensor:
    return torch.randint(4, 90, shape, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **more: Any) -> Tensor:
    return model(**given_to(model, len(ids)), decoder_input_ids=ids, **more).logits


def assert_alike(got: Tensor, wanted: Tensor, bound: float = 1e-4) -> None:
    assert float((got - wanted).norm() / wanted.norm()) < bound


@contextlib.contextmanager
def shapes_of_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The number of states and the shape of x of each call of the op."""
    calls: list[tuple[int, ...]] = []
    run = KeptProgram.__call__

    def counted(self: KeptProgram, states: Any, inputs: Any, starts: Any) -> Tensor:
        calls.append((len(states), *inputs[0].shape))
        return run(self, states, inputs, starts)

    with monkeypatch.context() as patch:
        patch.setattr(KeptProgram, "__call__", counted)
        yield calls


@pytest.mark.parametrize("name", MODELS)
def test_encoder_and_decoder_are_one_call_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    report = lowbit.fuse(model)
    assert {"model.encoder", "model.decoder"} <= set(report) and not report.left
    with shapes_of_calls(monkeypatch) as calls:
        got = logits(model, tokens(2, 5))
    assert calls == [(0, 2, 30, 64) if name == "Whisper" else (0, 1, 19, 64), (8, 2, 5, 64)]
    assert_alike(got, logits(eager, tokens(2, 5)))


@pytest.mark.parametrize("name", ["Whisper", "Bart"])
@pytest.mark.parametrize("config", CONFIGS)
def test_answers_are_the_same(name: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, sampled, by beams, and without a cache; each token is one call."""
    model = made(name, config)
    plain, given = copy.deepcopy(model), given_to(model)
    lowbit.fuse(model)
    for more in ({}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}, {"use_cache": False}):
        with shapes_of_calls(monkeypatch) as calls:
            torch.manual_seed(1)
            got = model.generate(**given, max_new_tokens=9, **more)
        torch.manual_seed(1)
        assert got.equal(plain.generate(**given, max_new_tokens=9, **more)), more
        assert len(calls) == 10, more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whisper's encoder clamps its results in float16, so its layers run their own code."""
    model = made().to(dtype)
    ids, x = tokens(2, 5), given_to(model)["input_features"].to(dtype)
    with torch.no_grad():
        wanted = model(x, decoder_input_ids=ids).logits
        lowbit.fuse(model)
        with shapes_of_calls(monkeypatch) as calls:
            got = model(x, decoder_input_ids=ids).logits
    assert calls == [(0, 2, 30, 64)][: int(dtype is torch.bfloat16)] + [(8, 2, 5, 64)]
    assert got.dtype == dtype
    assert_alike(got.float(), wanted.float(), 3e-2)


def test_large_results_in_float16_are_clamped() -> None:
    model = made().half()
    for layer in model.model.encoder.layers:
        layer.fc2.bias.data[3] = 4e4
    plain, x = copy.deepcopy(model), given_to(model)["input_features"].half()
    lowbit.fuse(model)
    with torch.no_grad():
        got, wanted = (each.model.encoder(x).last_hidden_state for each in (model, plain))
    assert wanted.isfinite().all()
    assert_alike(got.float(), wanted.float(), 3e-2)


def test_timestamps_and_long_sound() -> None:
    model = made(vocab_size=1600)
    given = model.generation_config
    given.no_timestamps_token_id, given.max_initial_timestamp_index, given.is_multilingual = 80, 50, False
    given.eos_token_id = given.pad_token_id = 2
    plain = copy.deepcopy(model)
    lowbit.fuse(model)
    for sound in (given_to(model), given_to(model, batch=1, long=True)):
        answers = [
            each.generate(**sound, max_new_tokens=12, return_timestamps=True, num_beams=beams)
            for beams in (1, 2)
            for each in (model, plain)
        ]
        assert answers[0].equal(answers[1]) and answers[2].equal(answers[3])
        assert answers[0].shape[1] > 3 and bool((answers[0] > 80).any())


def test_padding_and_prompts_of_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Whisper", "Bart"):
        model = made(name)
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        wanted = logits(model, tokens(2, 5), decoder_attention_mask=mask)
        lowbit.fuse(model)
        with shapes_of_calls(monkeypatch) as calls:
            got = logits(model, tokens(2, 5), decoder_attention_mask=mask)
        assert len(calls) == 2
        assert_alike(got[mask.bool()], wanted[mask.bool()])


@torch.no_grad()
def test_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is continued where its layers grow in place; others get the tokens through the layers' own code."""
    model, ids = made(), tokens(2, 7)
    encoded = transformers.modeling_outputs.BaseModelOutput(model.model.encoder(**given_to(model))[0])
    wanted = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits
    lowbit.fuse(model)
    config = model.config
    growing = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    plain = EncoderDecoderCache(DynamicCache(), DynamicCache())
    static = EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=length) for length in (16, 30)))
    for cache, in_one_call in ((None, True), (growing, True), (plain, False), (static, False)):
        got = []
        for part in ids.split([4, 1, 1, 1], dim=1):
            with shapes_of_calls(monkeypatch) as calls:
                output = model(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            assert [states for states, *_ in calls] == [8] * in_one_call
            got.append(output.logits)
        assert_alike(torch.cat(got, 1), wanted)
        assert cache.get_seq_length() == 7 and cache.is_updated == dict.fromkeys(cache.is_updated, True)


@torch.no_grad()
def test_another_encoder_result_needs_another_cache() -> None:
    """As in transformers, the cache keeps the keys and values of the first result; a crop forgets tokens alone."""
    model, ids = made(), tokens(2, 4)
    plain = copy.deepcopy(model)
    lowbit.fuse(model)
    answers = []
    for each in (model, plain):
        cache = each(**given_to(each), decoder_input_ids=ids).past_key_values
        cache.crop(-2)
        more = {"encoder_outputs": (torch.ones(2, 30, 64),), "past_key_values": cache}
        answers.append(each(**more, decoder_input_ids=ids[:, :1]).logits)
    assert_alike(*answers)


@torch.no_grad()
def test_its_own_code_runs_for_more_than_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(), tokens(2, 4)
    wanted = logits(model, ids)
    lowbit.fuse(model)
    with shapes_of_calls(monkeypatch) as calls:
        with torch.enable_grad():
            got = model(**given_to(model), decoder_input_ids=ids).logits
        assert got.requires_grad
        assert_alike(got.detach(), wanted)
        model.set_attn_implementation("sdpa")
        assert_alike(logits(model, ids), wanted)
        model.set_attn_implementation("lowbit")
        states = model(**given_to(model), decoder_input_ids=ids, output_hidden_states=True)
        assert len(states.encoder_hidden_states) == 4 and len(states.decoder_hidden_states) == 3
        assert not calls
        assert model.model.decoder(ids).last_hidden_state.shape == (2, 4, 64)  # without an encoder
        assert not calls


def other_eps(layer: nn.Module) -> None:
    layer.encoder_attn_layer_norm.eps = 5.0


def other_activation(layer: nn.Module) -> None:
    layer.activation_fn = nn.ReLU()


def other_scale(layer: nn.Module) -> None:
    layer.encoder_attn.scaling *= 8


def other_weights_of_queries(layer: nn.Module) -> None:
    layer.encoder_attn.q_proj.weight.data.copy_(layer.encoder_attn.q_proj.weight.data.flip(0))


def other_weights_of_keys(layer: nn.Module) -> None:
    layer.encoder_attn.k_proj.weight.data.copy_(layer.encoder_attn.k_proj.weight.data.flip(0))


def hook_on_keys(layer: nn.Module) -> None:
    layer.encoder_attn.k_proj.register_forward_hook(lambda module, given, y: -4 * y)


def hook_on_an_output(layer: nn.Module) -> None:
    layer.self_attn.out_proj.register_forward_hook(lambda module, given, y: 2 * y)


def hook_on_the_layer(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, given, y: y.flip(-1))


def a_bias_of_keys(layer: nn.Module) -> None:
    layer.self_attn.k_proj.bias = nn.Parameter(torch.full((64,), 3.0))


def no_bias_of_values(layer: nn.Module) -> None:
    layer.self_attn.v_proj.bias = None


CHANGES: tuple[Callable[[nn.Module], None], ...] = (
    other_eps, other_activation, other_scale, other_weights_of_queries, other_weights_of_keys, hook_on_keys,
    hook_on_an_output, hook_on_the_layer, no_bias_of_values,
)  # fmt: skip


def test_changes_take_effect_in_the_next_call() -> None:
    for change in CHANGES:
        model, other = made(), made()
        lowbit.fuse(model)
        before = logits(model, tokens(2, 4))
        change(model.model.decoder.layers[1]), change(other.model.decoder.layers[1])
        wanted = logits(other, tokens(2, 4))
        assert_alike(logits(model, tokens(2, 4)), wanted)
        assert float((before - wanted).norm() / wanted.norm()) > 1e-5, change.__name__


def test_a_bias_of_keys_that_came_later() -> None:
    """It changes no softmax, but what the cache holds."""
    model, other = made(), made()
    lowbit.fuse(model)
    logits(model, tokens(2, 4))
    a_bias_of_keys(model.model.decoder.layers[1]), a_bias_of_keys(other.model.decoder.layers[1])
    with torch.no_grad():
        got, wanted = (
            each(**given_to(each), decoder_input_ids=tokens(2, 4)).past_key_values.self_attention_cache.layers[1].keys
            for each in (model, other)
        )
    assert_alike(got, wanted)


def test_unfuse_dequantize_and_copies() -> None:
    model, ids = made(), tokens(2, 4)
    wanted, classes, names = logits(model, ids), [type(module) for module in model.modules()], list(model.state_dict())
    lowbit.fuse(model)
    assert list(model.state_dict()) == names
    assert_alike(logits(copy.deepcopy(model), ids), wanted)
    unfuse(model)
    assert [type(module) for module in model.modules()] == classes
    lowbit.fuse(model)
    lowbit.dequantize_(model)
    assert_alike(logits(model, ids), wanted)


def test_saved_models(tmp_path: Any) -> None:
    model, ids = made(), tokens(2, 4)
    lowbit.fuse(model)
    wanted = logits(model, ids)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="lowbit").eval()
    lowbit.fuse(loaded)
    assert_alike(logits(loaded, ids), wanted)


def test_layers_that_stay_say_why() -> None:
    model = made()
    model.model.decoder.layers[0].encoder_attn_layer_norm.register_forward_hook(lambda *_: None)
    model.model.decoder.layers[1].encoder_attn.layer_idx = None
    left = lowbit.fuse(model).left
    assert left["model.decoder.layers.0"] == "hooks on encoder_attn_layer_norm"
    assert left["model.decoder.layers.1"] == "its attentions do not have one layer_idx"
    torch.manual_seed(0)
    plain = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES | SOUND)).eval()
    assert "its q_proj is Linear, no QuantLinear" in lowbit.fuse(plain).left.values()
