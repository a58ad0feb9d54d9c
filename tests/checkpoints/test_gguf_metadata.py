# SPDX-License-Identifier: Apache-2.0
"""Metadata of a GGUF file: each key is read, known to be without effect, or the file is refused by its name. Angles of
rotary embeddings are compared with llama.cpp's formulas in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import CONFIGS, SIZES, gguf, transformers, write

import lowbit
from lowbit.checkpoints.gguf import save
from lowbit.checkpoints.gguf.architectures import ARCHITECTURES
from lowbit.checkpoints.gguf.config import attributes_of
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.checkpoints.gguf.metadata import WITHOUT_EFFECT
from lowbit.huggingface.load_gguf import load_model

More = Callable[[gguf.GGUFWriter], None]
HALF = 32  # pairs of columns of a head in these files
FREQUENCIES = np.geomspace(1, 9, HALF).astype(np.float32)
LONG = np.geomspace(2, 40, HALF).astype(np.float32)
POSITIONS = torch.tensor([[0, 1, 40, 4096, 20000]])
SMALL = SIZES | dict(hidden_size=256, num_attention_heads=4, max_position_embeddings=32768, pad_token_id=0)
TYPES = {name: type(config) for name, config in CONFIGS.items() if name not in ("tied", "gpt2")}


def small(name: str) -> transformers.PreTrainedConfig:
    """A model with 64 columns in a head, a context of 32768 and a base of 10000."""
    if name == "gemma3":
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        return TYPES[name](**SMALL, head_dim=64, rope_parameters={"full_attention": plain, "sliding_attention": dict(plain)})
    return TYPES[name](**SMALL, **({} if name in ("phi3", "starcoder2", "stablelm") else dict(head_dim=64)))


def linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), writer.add_rope_scaling_factor(4.0)


def yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(2048)


def longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_rope_scaling_attn_factors(1.19)
    writer.add_tensor("rope_factors_short.weight", FREQUENCIES), writer.add_tensor("rope_factors_long.weight", LONG)


def frequencies(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", FREQUENCIES)


def both(*more: More) -> More:
    return lambda writer: [each(writer) for each in more] and None


def base(value: float) -> More:
    return lambda writer: writer.add_rope_freq_base(value)


def every_second(writer: gguf.GGUFWriter) -> None:
    """Layers have a window."""
    writer.add_uint32(f"{writer.arch}.attention.sliding_window_pattern", 2)


def plain_angles(theta: float, rotated: int = 2 * HALF) -> np.ndarray:
    return theta ** (-np.arange(0, rotated, 2) / rotated)


def yarn_angles(theta: float, rotated: int = 2 * HALF, fast: float = 32, slow: float = 1) -> np.ndarray:
    """ggml_rope_yarn_corr_dims and rope_yarn."""
    ends = [rotated * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)]
    low, high = max(0, math.floor(ends[0])), min(rotated - 1, math.ceil(ends[1]))
    ramp = 1 - np.clip((np.arange(rotated // 2) - low) / max(0.001, high - low), 0, 1)
    return plain_angles(theta, rotated) * ((1 - ramp) / 4 + ramp)


def rotary(path: Path, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of half of the rotated columns, ``[positions, columns]``."""
    model = load_model(path, activations="float", fuse=False)
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(torch.zeros(1), POSITIONS, **kwargs)
    return cos[0, :, : cos.shape[-1] // 2].double(), sin[0, :, : sin.shape[-1] // 2].double()


def assert_rotates(path: Path, angles: np.ndarray, magnitude: float = 1.0, **kwargs) -> None:
    cos, sin = rotary(path, **kwargs)
    wanted = POSITIONS[0].double()[:, None] * torch.from_numpy(angles)
    assert cos.shape == wanted.shape
    for ours, exact in ((cos, wanted.cos()), (sin, wanted.sin())):
        assert (ours - magnitude * exact).abs().max() < 3e-3  # float32 of an angle of 20000


SCALINGS = {
    "none": (base(30000.0), lambda n: plain_angles(30000.0, n), 1.0),
    "base of 10000": (lambda writer: None, lambda n: plain_angles(10000.0, n), 1.0),
    "linear": (both(base(30000.0), linear), lambda n: plain_angles(30000.0, n) / 4, 1.0),
    "linear, older": (lambda writer: writer.add_float32(f"{writer.arch}.rope.scale_linear", 4.0), lambda n: plain_angles(10000.0, n) / 4, 1.0),
    "yarn": (both(base(30000.0), yarn), lambda n: yarn_angles(30000.0, n), 1 + 0.1 * math.log(4)),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", TYPES)
def test_the_angles_are_those_of_llama_cpp(name, scaling, tmp_path):
    more, angles, magnitude = SCALINGS[scaling]
    config = small(name)
    path = write(tmp_path / "model.gguf", name, config=config, more=both(more, every_second) if name == "gemma3" else more)
    if name == "phi3" and scaling == "yarn":
        with pytest.raises(ValueError, match="phi3.rope.scaling.type must be none, linear or longrope .* got 'yarn'"):
            load_model(path)
        return
    layers = dict(layer_type="full_attention") if name == "gemma3" else {}
    rotated = int(64 * config.rope_parameters.get("partial_rotary_factor", 1)) if not layers else 64
    assert_rotates(path, angles(rotated), magnitude, **layers)
    if layers:  # those with a window are not scaled
        assert_rotates(path, plain_angles(10000.0), layer_type="sliding_attention")


@pytest.mark.parametrize("name", TYPES)
def test_a_file_without_a_base_has_that_of_llama_cpp(name, tmp_path):
    file = GgufFile.open(write(tmp_path / "model.gguf", name))
    del file.metadata[f"{name}.rope.freq_base"], file.metadata[f"{name}.rope.dimension_count"]
    rope = attributes_of(file)[1]["rope_parameters"]
    assert rope.get("full_attention", rope)["rope_theta"] == 10000.0


@pytest.mark.parametrize(("name", "more", "short", "long", "magnitude"), [
    ("llama", frequencies, FREQUENCIES, FREQUENCIES, 1.0),
    ("llama", both(frequencies, linear), 4 * FREQUENCIES, 4 * FREQUENCIES, 1.0),
    ("llama", longrope, FREQUENCIES, LONG, 1.19),
    ("phi3", longrope, FREQUENCIES, LONG, 1.19),
], ids=["llama 3", "llama 3, linear", "llama, longrope", "phi3, longrope"])  # fmt: skip
def test_divisors_in_tensors(name, more, short, long, magnitude, tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", name, config=small(name), more=both(base(30000.0), more))
    assert_rotates(path, plain_angles(30000.0) / long, magnitude)  # positions up to 20000: longer than the 4096 of the training
    monkeypatch.setitem(globals(), "POSITIONS", POSITIONS[:, :3])
    assert_rotates(path, plain_angles(30000.0) / short, magnitude)


def divisors_of_llama3(factor: float, base: float, half: int = HALF) -> np.ndarray:
    """As llama.cpp's converter writes them (conversion/llama.py)."""
    divisors = []
    for frequency in base ** -(np.arange(half) / half):
        wave = 2 * math.pi / frequency
        smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
        divisors.append(1 if wave < 8192 / 4.0 else factor if wave > 8192 / 1.0 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("factor", "theta", "scale"), [(8.0, 500000.0, 1), (32.0, 500000.0, 1), (4.0, 10000.0, 1), (8.0, 500000.0, 1.01)])
def test_the_divisors_of_llama3_have_their_name(factor, theta, scale, tmp_path):
    divisors = divisors_of_llama3(factor, theta) * np.float32(scale)
    more = both(base(theta), lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    path = write(tmp_path / "model.gguf", "llama", config=small("llama"), more=more)
    rope = attributes_of(GgufFile.open(path))[1]["rope_parameters"]
    assert rope["rope_type"] == ("llama3" if scale == 1 else "longrope") and rope["factor"] == (factor if scale == 1 else 1)
    assert_rotates(path, plain_angles(theta) / divisors)


@pytest.mark.parametrize("name", ["phi3", "stablelm", "nemotron"])
@pytest.mark.parametrize("rotated", [16, 24, 48])
def test_the_rotated_columns_are_those_of_the_file(name, rotated, tmp_path):
    path = write(tmp_path / "model.gguf", name, config=small(name), more=lambda writer: writer.add_rope_dimension_count(rotated))
    assert_rotates(path, plain_angles(10000.0, rotated))


def test_the_ramp_and_the_magnitude_of_yarn_are_those_of_the_file(tmp_path):
    def more(writer):
        yarn(writer), writer.add_rope_scaling_yarn_beta_fast(16.0), writer.add_rope_scaling_yarn_beta_slow(2.0)
        writer.add_rope_scaling_yarn_attn_factor(1.5), writer.add_rope_scaling_attn_factors(0.5)

    path = write(tmp_path / "model.gguf", "qwen2", config=small("qwen2"), more=more)
    assert_rotates(path, yarn_angles(10000.0, fast=16, slow=2), 0.75)


def test_the_base_of_layers_with_a_window(tmp_path):
    more = lambda writer: writer.add_float32("gemma3.rope.freq_base_swa", 500.0)  # noqa: E731
    path = write(tmp_path / "model.gguf", "gemma3", config=small("gemma3"), more=more)
    assert_rotates(path, plain_angles(500.0), layer_type="sliding_attention")
    with pytest.raises(ValueError, match="gemma2.rope.freq_base_swa must be 10000.0 .all layers rotate alike., got 500.0"):
        attributes_of(GgufFile.open(write(tmp_path / "model.gguf", "gemma2", more=lambda writer: writer.add_float32("gemma2.rope.freq_base_swa", 500.0))))


def test_a_scaled_model_is_saved_and_read_by_from_pretrained(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", config=small("llama"), more=frequencies)
    model = load_model(path, activations="float")
    save(model, tmp_path / "saved.gguf", like=path)
    assert bytes(GgufFile.open(tmp_path / "saved.gguf").tensors["rope_freqs.weight"].data) == FREQUENCIES.tobytes()
    assert_rotates(tmp_path / "saved.gguf", plain_angles(10000.0) / FREQUENCIES)
    config = lowbit.LowbitConfig("gguf", activations="float")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, quantization_config=config, attn_implementation="lowbit")
    again.save_pretrained(tmp_path / "packed")
    packed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="lowbit")
    x = torch.arange(50)[None]
    with torch.no_grad():
        wanted = model(x).logits
        assert all((other(x).logits - wanted).norm() < 1e-5 * wanted.norm() for other in (again, packed))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_from_pretrained_makes_the_same_model(name, tmp_path):
    """Of attributes that transformers' own reading of a file leaves out."""
    path = write(tmp_path / "model.gguf", name, config=small(name) if name != "gpt2" else None, more=linear if name not in ("gpt2", "phi3") else lambda writer: None)
    config = lowbit.LowbitConfig("gguf", activations="float")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, quantization_config=config, attn_implementation="lowbit")
    attributes = attributes_of(GgufFile.open(path))[1]
    assert {key: getattr(model.config, key) for key in attributes} == attributes
    x = torch.arange(40)[None]
    with torch.no_grad():
        wanted = load_model(path, activations="float", fuse=False)(x).logits
        assert (model(x).logits - wanted).norm() < 1e-5 * wanted.norm()


# ---- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["phi3", "starcoder2", "gemma2", "gemma3"])
def test_a_window_hides_what_is_before_it(name, tmp_path):
    path = write(tmp_path / "model.gguf", name, "F32", config=small(name), more=lambda writer: writer.add_sliding_window(8))
    model = load_model(path, fuse=False)
    x = torch.arange(40)[None]
    other = torch.cat([x[:, :20].flip(1), x[:, 20:]], dim=1)
    with torch.no_grad():
        far, near = ((model(x).logits - model(other).logits)[0, at].abs().max() for at in (20 + 2 * 7, 22))
    layers = attributes_of(GgufFile.open(path))[1].get("layer_types", [])
    assert layers == {"gemma2": ["sliding_attention", "full_attention"], "gemma3": ["sliding_attention"] * 2}.get(name, [])
    assert near > 1e-3 and (far < 1e-4) == ("full_attention" not in layers)


def test_layers_with_a_window_as_the_file_says(tmp_path):
    more = lambda writer: writer.add_array("gemma3.attention.sliding_window_pattern", [False, True])  # noqa: E731
    file = GgufFile.open(write(tmp_path / "model.gguf", "gemma3", more=more))
    assert attributes_of(file)[1]["layer_types"] == ["full_attention", "sliding_attention"]
    del file.metadata["gemma3.attention.sliding_window_pattern"], file.metadata["gemma3.attention.sliding_window"]
    assert attributes_of(file)[1]["layer_types"] == ["full_attention", "full_attention"]


def test_a_gemma3_without_a_window_sees_everything(tmp_path):
    config = small("gemma3")
    config.sliding_window = None
    model = load_model(write(tmp_path / "model.gguf", "gemma3", "F32", config=config), fuse=False)
    x = torch.arange(60)[None]
    with torch.no_grad():
        assert (model(x).logits - model(torch.cat([x[:, :1] + 1, x[:, 1:]], dim=1)).logits)[0, -1].abs().max() > 1e-4


def test_a_window_that_the_model_does_not_have(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", more=lambda writer: writer.add_sliding_window(8))
    with pytest.raises(ValueError, match="llama.attention.sliding_window must be 0 or the context length .the model has no window., got 8"):
        load_model(path)
    load_model(write(tmp_path / "model.gguf", "llama", more=lambda writer: writer.add_sliding_window(64)))


# ---- special words -------------------------------------------------------------------------------------------------


def test_an_answer_ends_at_every_word_that_ends_it(tmp_path):
    def more(writer):
        writer.add_eot_token_id(20), writer.add_uint32("tokenizer.ggml.eom_token_id", 30)

    attributes = attributes_of(GgufFile.open(write(tmp_path / "model.gguf", "llama", words=True, more=more)))[1]
    assert attributes["eos_token_id"] == [8, 20, 30]  # 8: "<|end|>", which the file names too
    model = load_model(write(tmp_path / "model.gguf", "llama", "F32", more=more))
    config = lowbit.LowbitConfig("gguf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", quantization_config=config)
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id == [20, 30]
    head = torch.zeros(64, 256)
    head[20] = 1  # of a norm whose weights are near 1
    model.lm_head, model.model.norm = torch.nn.Linear(256, 64, bias=False), torch.nn.Identity()
    model.lm_head.weight.data = head
    model.model.register_forward_hook(lambda module, args, out: out.__setitem__("last_hidden_state", torch.ones_like(out.last_hidden_state)))
    assert model.generate(torch.tensor([[1]]), max_new_tokens=6, do_sample=False).tolist() == [[1, 20]]


def test_words_of_a_sentencepiece_file_that_names_none(tmp_path):
    attributes = attributes_of(GgufFile.open(write(tmp_path / "model.gguf", "llama", more=lambda writer: writer.add_tokenizer_model("llama"))))[1]
    assert (attributes["bos_token_id"], attributes["eos_token_id"], attributes["pad_token_id"]) == (1, 2, 0)


# ---- every key -----------------------------------------------------------------------------------------------------

TAKEN = {
    f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "merges", "scores", "token_type", "add_bos_token", "add_eos_token", "add_space_prefix", "unknown_token_id")
} | {"tokenizer.chat_template"}  # fmt: skip
"""Keys that the tokenizer is made of."""


def keys_of_the_writer(architecture: str) -> list[str]:
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    keys = {key for group in groups for key in vars(group).values() if isinstance(key, str) and "." in key and not key.startswith(("lowbit", "gguf"))}
    return sorted(re.sub("{.*?}", "0", key.replace("{arch}", architecture)) for key in keys)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_every_key_of_the_writer_is_read_or_known_or_refused(name, tmp_path):
    file = GgufFile.open(write(tmp_path / "model.gguf", name, more=yarn if name != "gpt2" else lambda writer: None))
    before, original = attributes_of(file)[1], dict(file.metadata)
    keys = keys_of_the_writer(name)
    refused = set()
    for key in keys:
        changed = set()
        for value in (2, 7):
            file.metadata = original | {key: value}
            try:
                changed.add(attributes_of(file)[1] != before)
            except ValueError as error:
                assert key in str(error) or key.rpartition(".")[0] in str(error), (key, error)
                refused.add(key)
        known = any(re.fullmatch(pattern.replace("ARCH", name), key) for pattern in WITHOUT_EFFECT.values())
        assert True in changed or known or key in TAKEN | refused, key
    assert len(keys) > 200 and len(refused) > 100


@pytest.mark.parametrize("key", ["llama.logit_scale", "llama.attention.scale", "tokenizer.ggml.suppress_tokens", "general.tensor_extra.prec_a4", "somebody.added", "clip.has_text_encoder"])
def test_a_key_that_nothing_reads_is_refused_by_name(key, tmp_path):
    path = write(tmp_path / "model.gguf", "llama", more=lambda writer: writer.add_float32(key, 0.5))
    for load in (load_model, lambda path: transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, quantization_config=lowbit.LowbitConfig("gguf"))):
        with pytest.raises(ValueError, match=f"model.gguf: every key must be one that lowbit reads for llama .*, got {key}"):
            load(path)


def test_an_array_of_texts_that_nothing_reads_is_refused_by_name(tmp_path):
    path = write(tmp_path / "model.gguf", "llama", more=lambda writer: writer.add_array("llama.classifier.output_labels", ["yes", "no"]))
    with pytest.raises(ValueError, match="got llama.classifier.output_labels"):
        load_model(path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_value_that_is_given_as_texts_is_refused_by_the_name_of_its_key(name, tmp_path):
    """Also one that has a default, which it took."""
    write(tmp_path / "model.gguf", name)
    original = GgufFile.open(tmp_path / "model.gguf")
    attributes_of(original)
    keys = {key for key in original.metadata if not any(re.fullmatch(known.replace("ARCH", name), key) for known in WITHOUT_EFFECT.values())}
    keys |= {f"{name}.attention.head_count_kv", f"{name}.expert_count", "tokenizer.ggml.eot_token_id", "split.count"}

    def texts(writer: gguf.GGUFWriter, key: str) -> None:
        writer.add_array(key, ["2", "2"])

    for key in keys - {"general.architecture"}:
        path = write(tmp_path / "other.gguf", name, words=True, more=lambda writer, key=key: texts(writer, key))
        with pytest.raises(ValueError, match=f"other.gguf.*{re.escape(key)} must not be an array of strings, got one of 2"):
            lowbit.load_gguf(path)


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_words_that_are_no_array_of_texts_are_refused(key, tmp_path):
    path = write(tmp_path / "model.gguf", "llama", words=True, more=lambda writer: writer.add_array(key, [1, 2]))
    with pytest.raises(ValueError, match=rf"model.gguf.*{key} must be an array of strings, got \[1, 2\]"):
        lowbit.load_gguf(path)


@pytest.mark.parametrize("heads", [[4], [4] * 3, [4] * 40])
def test_a_list_of_heads_has_a_number_for_each_layer(heads, tmp_path):
    path = write(tmp_path / "model.gguf", "llama", more=lambda writer: writer.add_array("llama.attention.head_count", heads))
    with pytest.raises(ValueError, match="model.gguf: llama.attention.head_count must be one value, or one for each of the 2 layers"):
        load_model(path)
    write(path, "llama", more=lambda writer: writer.add_array("llama.attention.head_count", [4, 4]))
    load_model(path)


def test_keys_without_effect_change_nothing(tmp_path):
    def more(writer):
        writer.add_array("general.tags", ["chat"]), writer.add_string("quantize.imatrix.file", "x"), writer.add_string("mradermacher.quantized_by", "y")
        writer.add_string("general.base_model.0.name", "z"), writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 3), writer.add_bool("llama.rope.scaling.finetuned", True)

    with_them, without = (attributes_of(GgufFile.open(write(tmp_path / "model.gguf", "llama", more=each))) for each in (more, lambda writer: None))
    assert with_them == without


@pytest.mark.parametrize("tensor", ["blk.0.attn_q_norm.weight", "blk.0.attn_q.bias", "v.blk.0.ln1.weight", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight"])
def test_a_tensor_without_a_place_is_refused_by_name(tensor, tmp_path):
    path = write(tmp_path / "model.gguf", "starcoder2" if "bias" not in tensor else "gemma3", more=lambda writer: writer.add_tensor(tensor, np.ones(HALF, np.float32)))
    with pytest.raises(ValueError, match=f"every tensor must belong to a parameter of .*ForCausalLM of transformers, got {tensor}"):
        load_model(path)


@pytest.mark.parametrize("biases", [("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")])
def test_biases_of_a_llama_are_read(biases, tmp_path):
    config = small("llama")
    config.attention_bias, config.mlp_bias = "attn_q" in biases, "ffn_up" in biases
    model = load_model(write(tmp_path / "model.gguf", "llama", "F32", config=config), fuse=False)
    assert sum(name.endswith(".bias") for name in model.state_dict()) == 2 * len(biases)


@pytest.mark.parametrize("architecture", ["bamba", "mpt", "bloom", "rwkv6"])
def test_an_architecture_that_is_not_in_the_table(architecture, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"model.gguf: general.architecture must be one of llama, .*, got '{architecture}'"):
        lowbit.load_gguf(tmp_path / "model.gguf")


def test_factors_of_longrope_that_are_missing(tmp_path):
    more = lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)  # noqa: E731
    with pytest.raises(ValueError, match="llama.rope.scaling.type must be of a file with rope_factors_short.weight and .*, got 'longrope'"):
        load_model(write(tmp_path / "model.gguf", "llama", more=more))


@pytest.mark.parametrize(("values", "message"), [(np.ones(31), "F32 of shape .32., got F32 of .31."), (-np.ones(32), "numbers above 0")])
def test_divisors_that_are_none(values, message, tmp_path):
    path = write(tmp_path / "model.gguf", "llama", more=lambda writer: writer.add_tensor("rope_freqs.weight", values.astype(np.float32)))
    with pytest.raises(ValueError, match=f"model.gguf: tensor rope_freqs.weight must .*{message}"):
        load_model(path)


WRONG = {
    "llama.block_count": (0, "one number from 1 on, got 0"),
    "llama.attention.head_count": ([4, 2], r"one number from 1 on, got \[4, 2\]"),
    "llama.attention.head_count_kv": (3, "a divisor of the 4 heads, got 3"),
    "llama.attention.layer_norm_rms_epsilon": (float("nan"), "a number above 0, got nan"),
    "llama.attention.value_length": (32, "64 .as many as attention.key_length., got 32"),
    "llama.rope.dimension_count": (32, "64, the columns of a head, got 32"),
    "llama.rope.freq_base": (-1.0, "a number above 0, got -1.0"),
    "llama.rope.scaling.type": ("ntk", "none, linear, yarn or longrope, got 'ntk'"),
    "llama.rope.scaling.factor": (-4.0, "a number above 0, got -4.0"),
    "llama.rope.scaling.attn_factor": (2.0, "1.0 .the scaling is linear., got 2.0"),
    "llama.rope.scaling.yarn_ext_factor": (0.5, "1.0 or -1.0 .transformers has no such mixture., got 0.5"),
    "llama.attention.causal": (False, "True .the model continues texts., got False"),
    "qwen2.expert_count": (8, "0 .experts are read in llama, .*, got 8"),
    "phi3.attention.sliding_window": (-1, "one number from 1 on, got -1"),
    "gemma3.attention.sliding_window": (2.5, "one number from 1 on, got 2.5"),
    "gemma3.final_logit_softcapping": (float("nan"), "a number above 0, got nan"),
    "gemma3.attention.sliding_window_pattern": ([True], r"one value, or one for each of the 2 layers, got \[True\]"),
    "phi3.attention.head_count_kv": ([2, 2, 2], r"one value, or one for each of the 2 layers, got \[2, 2, 2\]"),
    "llama.feed_forward_length": ([512], r"one value, or one for each of the 2 layers, got \[512\]"),
    "llama.context_length": ([128, 128], r"one value, got \[128, 128\]"),
    "tokenizer.ggml.eos_token_id": (9999, "a number below 64, how many words the model has, got 9999"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_without_a_meaning_is_refused_by_the_name_of_its_key(key, tmp_path):
    name = key.partition(".")[0]
    file = GgufFile.open(write(tmp_path / "model.gguf", name if name in ARCHITECTURES else "llama"))
    value, message = WRONG[key]
    file.metadata[key] = value
    with pytest.raises(ValueError, match=f"model.gguf: {key} must be {message}"):
        attributes_of(file)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_key_that_every_file_has_is_missed_by_name(name, tmp_path):
    file = GgufFile.open(write(tmp_path / "model.gguf", name))
    del file.metadata[f"{name}.block_count"]
    with pytest.raises(ValueError, match=f"model.gguf: {name}.block_count must be in the metadata, got none"):
        attributes_of(file)


@pytest.mark.parametrize(("layers", "name", "largest"), [(46, "gemma2", True), (42, "gemma2", False), (62, "gemma3", True), (2, "gemma3", False)])
def test_scores_of_the_largest_gemma_are_scaled_by_its_width(layers, name, largest, tmp_path):
    config = type(CONFIGS[name])(**SIZES | dict(num_hidden_layers=2, num_attention_heads=2), head_dim=64)
    file = GgufFile.open(write(tmp_path / "model.gguf", name, config=config))
    file.metadata[f"{name}.block_count"] = layers
    assert attributes_of(file)[1]["query_pre_attn_scalar"] == (128 if largest else 64)
