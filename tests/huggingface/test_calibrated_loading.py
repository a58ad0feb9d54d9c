# SPDX-License-Identifier: Apache-2.0
"""LowbitConfig(calibration=...): from_pretrained and `lowbit quantize` pack what quantize_ packs with it, and a saved model
does not name it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit.__main__ import main
from lowbit.quant.own_text import own_text

transformers = pytest.importorskip("transformers")
from lowbit.huggingface import calibrate_by_layer as by_layer  # noqa: E402

CONFIG = "int8_dynamic_activation_int4_weight(group_size=32)"


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.quant.own_text.TOKENS", 24)


def saved(folder: Path, tied: bool = False, **options: object) -> tuple[Path, nn.Module]:
    torch.manual_seed(1)
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "float", **options)
    return folder / "float", model


def same(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_packs_what_quantize_packs(tied, tmp_path):
    folder, model = saved(tmp_path, tied)
    settings = lowbit.LowbitConfig(CONFIG, calibration="self")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings)
    report = lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(32), calibration="self")
    assert same(loaded, model)
    got = loaded.hf_quantizer.report
    assert [row.layer for row in got.quantized] == [row.layer for row in report.quantized] and got.notes == report.notes
    loaded.save_pretrained(tmp_path / "packed")
    entry = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    assert entry["config"] == CONFIG and "GPTQ" not in str(entry) and "calibration" not in entry
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), loaded)


def test_what_stays_float_and_other_formats_are_as_without_a_calibration(tmp_path):
    folder, _ = saved(tmp_path)
    plan = {"model.layers.0.mlp.up_proj": None, "model.layers.1.mlp.up_proj": "int8_weight_only()"}
    told = {}
    for calibration in (None, "self"):
        settings = lowbit.LowbitConfig(CONFIG, ["q_proj"], plan=plan, calibration=calibration)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings)
        told[calibration] = [(row.layer, row.format, row.note) for row in model.hf_quantizer.report.rows]
    assert told[None] == told["self"] and ("model.layers.1.mlp.up_proj", "int8 per-channel", "") in told["self"]


def test_gptq_takes_batches_and_text(tmp_path):
    folder, model = saved(tmp_path)
    text, config = "Bread rises because yeast turns sugar into gas.", "int4_weight_only(group_size=32, algorithm=GPTQ())"
    words = lambda text: {"input_ids": [number % 97 for number in text.encode()]}  # noqa: E731
    loaded = []
    for batches, tokenizer in (([torch.tensor([words(text)["input_ids"]])], None), ([text], words)):
        settings = lowbit.LowbitConfig(config, calibration=batches, tokenizer=tokenizer)
        loaded.append(transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings))
    assert same(*loaded)
    lowbit.quantize_(model, lowbit.int4_weight_only(32, algorithm=lowbit.GPTQ()), calibration=[text], tokenizer=words)
    assert same(loaded[0], model)


def test_without_calibration_gptq_is_refused_and_a_file_has_its_codes():
    with pytest.raises(ValueError, match="config must be quantized without inputs of the model, .* give calibration='self'"):
        lowbit.LowbitConfig("int4_weight_only(algorithm=GPTQ())")
    with pytest.raises(ValueError, match="LowbitConfig: calibration must be None with 'gguf'"):
        lowbit.LowbitConfig("gguf", calibration="self")


def test_the_command_line_makes_the_same_folder(tmp_path, capsys):
    folder, model = saved(tmp_path, max_shard_size="60KB")
    (folder / "notes.md").write_text("a note")
    (tmp_path / "packed.partial").mkdir()
    given = ["quantize", str(folder), str(tmp_path / "packed"), "--config", CONFIG, "--calibration"]
    assert main([*given, "self"]) == 0
    assert "calibrated on 16 x 24 tokens that the model wrote by itself" in capsys.readouterr().out
    assert {"config.json", "notes.md"} < {path.name for path in (tmp_path / "packed").iterdir()}
    assert not (tmp_path / "packed.partial").exists()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(32), calibration="self")
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), model)
    assert main([*given[:2], str(tmp_path / "other"), *given[3:], str(tmp_path / "missing.txt")]) == 1
    assert "missing.txt" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_the_command_line_reads_a_text_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder, model = saved(tmp_path)
    words = {word: number for number, word in enumerate("the river froze before first snow fell".split())}  # noqa: SIM905
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="the"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    text = "the river froze before the first snow fell " * 9
    (tmp_path / "text.txt").write_text(text)
    given = [str(folder), str(tmp_path / "packed"), "--config", CONFIG, "--calibration", str(tmp_path / "text.txt")]
    assert main(["quantize", *given]) == 0
    ids = torch.tensor([[words[word] for word in text.split()]])
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(32), calibration=[ids])
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), model)


def test_a_model_that_does_not_fit_is_calibrated_with_one_float_layer_at_a_time(tmp_path, monkeypatch):
    folder, model = saved(tmp_path, max_shard_size="60KB")
    monkeypatch.setattr(by_layer, "available_bytes", lambda: 0)
    packed, floats, pack = [], [], by_layer.pack_calibrated
    start = by_layer.calibrate_by_layer
    monkeypatch.setattr(by_layer, "calibrate_by_layer", lambda model, *given: (packed.append(model), start(model, *given)))

    def counted(*given: object) -> object:
        floats.append(sum(type(module) is nn.Linear for module in packed[0].modules()))
        return pack(*given)

    monkeypatch.setattr(by_layer, "pack_calibrated", counted)
    report = lowbit.quantize_checkpoint(folder, tmp_path / "packed", CONFIG, calibration="self")
    assert floats == [1] * 14 and all(row.format for row in report.rows)
    assert "calibrated on 16 x 24 tokens that the model wrote by itself, with weights packed without data" in str(report)

    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(CONFIG))
    text = [{"input_ids": torch.cat([batch["input_ids"] for batch in own_text(plain)])}]
    gptq = lowbit.int8_dynamic_activation_int4_weight(32, algorithm=lowbit.GPTQ())
    lowbit.quantize_(model, gptq, calibration=text)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert same(loaded, model) and not same(loaded, plain)


def test_experts_that_do_not_fit_take_gptq_with_one_layer_float_at_a_time(tmp_path, monkeypatch):
    torch.manual_seed(1)
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(**sizes, intermediate_size=96, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "float")
    monkeypatch.setattr(by_layer, "available_bytes", lambda: 0)
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", CONFIG, calibration="self")
    cls = transformers.AutoModelForCausalLM
    plain = cls.from_pretrained(tmp_path / "float", quantization_config=lowbit.LowbitConfig(CONFIG))
    text = [{"input_ids": torch.cat([batch["input_ids"] for batch in own_text(plain)])}]
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "float").eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int4_weight(32, algorithm=lowbit.GPTQ()), calibration=text)
    loaded = cls.from_pretrained(tmp_path / "packed")
    assert same(loaded, model) and not same(loaded, plain)


def test_layer_by_layer_refuses_a_layer_that_is_called_twice_or_shares_its_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(by_layer, "available_bytes", lambda: 0)
    folder, _ = saved(tmp_path, tied=True)
    with pytest.raises(ValueError, match="a calibration layer by layer needs weights that no other layer has, got lm_head"):
        lowbit.quantize_checkpoint(
            folder, tmp_path / "out", CONFIG, embeddings="int4_weight_only(group_size=32)", calibration="self"
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(CONFIG))
    model.model.layers[1] = model.model.layers[0]
    formats = {"model.layers.0.mlp.up_proj": lowbit.int8_dynamic_activation_int4_weight(32)}
    with pytest.raises(ValueError, match="must be called once with a text, got two calls of model.layers.0.mlp.up_proj"):
        by_layer.calibrate_by_layer(model, model.hf_quantizer.report, formats, lambda name: torch.randn(96, 64))
    assert not (tmp_path / "out").exists()


def test_the_memory_that_is_free_is_told_in_bytes():
    assert 2**20 < by_layer.available_bytes() < 2**50
