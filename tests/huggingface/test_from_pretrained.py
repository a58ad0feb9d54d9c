# SPDX-License-Identifier: Apache-2.0
"""from_pretrained(quantization_config=LowbitConfig(...)): what is packed while it is read, saved, and read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import MODELS, logits, save

import lowbit
from lowbit import _C
from lowbit.formats import FORMATS
from lowbit.quant import repack

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

W4A8 = lowbit.int8_dynamic_activation_int4_weight()
DENSE = [cls for cls in FORMATS if not issubclass(cls, lowbit.SemiSparseWeightConfig)]


@pytest.fixture(params=["llama", "tied", "bf16", "gpt2", "bert"])
def saved(request, tmp_path: Path):
    """(the class, the float model, the folder that holds it)"""
    cls, folder = MODELS[request.param][0], save(request.param, tmp_path)
    return cls, cls.from_pretrained(folder), folder


def layers(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, (lowbit.QuantLinear, lowbit.QuantEmbedding))]


@pytest.mark.parametrize("config", [cls() for cls in FORMATS], ids=lambda config: config.function)
def test_a_loaded_model_is_the_one_that_quantize_makes(saved, config):
    cls, model, folder = saved
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(config))
    report = lowbit.quantize_(model, config, lambda module, name: name in layers(loaded))
    assert layers(loaded) == layers(model) == [row.layer for row in report.quantized]
    assert torch.equal(logits(loaded), logits(model))
    assert not [name for name, tensor in (*loaded.named_buffers(), *loaded.named_parameters()) if tensor.is_meta]
    ours = loaded.hf_quantizer.report
    assert repr([row for row in ours.rows if row.format]) == repr(report.quantized)  # nan is no longer equal to itself in a row of Python 3.13
    assert (ours.model_bytes_before, ours.model_bytes_after) == (report.model_bytes_before, report.model_bytes_after)


def test_without_a_rule_of_its_own_the_output_head_is_as_other_layers_and_stays_float_where_it_is_tied(saved):
    cls, model, folder = saved
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8, head=None))
    head, embedding = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (type(head) is torch.nn.Linear) == (head.weight is embedding.weight) == tied
    notes = {row.layer: row.note for row in loaded.hf_quantizer.report.skipped}
    assert set(notes.values()) == ({"its weight is tied"} if tied else set())


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_checkpoint_comes_back_bit_for_bit(saved, shard, tmp_path):
    cls, _, folder = saved
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8))
    loaded.save_pretrained(tmp_path / "packed", max_shard_size=shard)
    files = sorted((tmp_path / "packed").glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "20KB")
    again = cls.from_pretrained(tmp_path / "packed")
    assert layers(again) == layers(loaded)
    wanted = loaded.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(logits(again), logits(loaded))
    again.save_pretrained(tmp_path / "again", max_shard_size=shard)
    for file in files:
        old, new = safetensors.load_file(file), safetensors.load_file(tmp_path / "again" / file.name)
        assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    fresh = cls(loaded.config).eval()
    lowbit.load(fresh, tmp_path / "packed")
    assert torch.equal(logits(fresh), logits(loaded))


def test_files_say_what_they_hold(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    config = lowbit.LowbitConfig("int4_weight_only(group_size=32)", plan={"model.layers.0.mlp.up_proj": "int8_weight_only()"})
    cls.from_pretrained(folder, quantization_config=config).save_pretrained(tmp_path / "packed")
    with safetensors.safe_open(tmp_path / "packed" / "model.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "lowbit.version": lowbit.__version__,
            "lowbit.layout": _C.LAYOUT,
            "lowbit.layout_version": str(_C.LAYOUT_VERSION),
            "lowbit.formats": "int4 g32, int8 g32, int8 per-channel",
        }
    entry = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert entry == {
        "quant_method": "lowbit",
        "version": 1,
        "config": "int4_weight_only(group_size=32)",
        "modules_to_not_convert": None,
        "plan": {"model.layers.0.mlp.up_proj": "int8_weight_only(group_size=None)"},
    }
    assert lowbit.LowbitConfig.from_dict(entry) == config


@pytest.mark.parametrize("layout", ["row-major", "version 1"])
def test_another_layout_is_repacked(saved, layout, tmp_path):
    cls, _, folder = saved
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8))
    wanted = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    loaded.save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    state = safetensors.load_file(file)
    if layout == "row-major":
        state = repack(state)
    else:
        for name in [name for name in state if name.endswith(".layout")]:
            state[name] = torch.cat([torch.ones(1, dtype=torch.int64), state[name][1:7]])
    safetensors.save_file(state, file, {"format": "pt"})
    again = cls.from_pretrained(tmp_path / "packed")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())


def test_a_checkpoint_of_the_whole_model_serves_its_base(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8))
    loaded.save_pretrained(tmp_path / "packed")
    base = transformers.LlamaModel.from_pretrained(tmp_path / "packed")
    assert [*(f"model.{name}" for name in layers(base)), "lm_head"] == layers(loaded)
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, loaded.model(ids).last_hidden_state)


def test_a_plan_says_the_format_of_single_layers(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    plan = {"model.layers.0.mlp.up_proj": lowbit.int8_weight_only(), "model.layers.1.mlp.up_proj": None, "lm_head": "int8_weight_only"}
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8, plan=plan))
    formats = {row.layer: row.format for row in loaded.hf_quantizer.report.rows}
    assert formats["model.layers.0.mlp.up_proj"] == formats["lm_head"] == "int8 per-channel"
    assert formats["model.layers.1.mlp.up_proj"] == "" and formats["model.layers.1.mlp.down_proj"].startswith("int4")
    alone = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(plan={"lm_head": W4A8}))
    assert layers(alone) == ["lm_head"]


@pytest.mark.parametrize(
    ("plan", "match"),
    [({"model.layers.9": W4A8}, "plan must name linear layers and embeddings of the model, got model.layers.9"), ({"lm_head": W4A8}, "lm_head, which cannot be quantized: its weight is tied")],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(plan, match, tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("tied", tmp_path)
    with pytest.raises(ValueError, match=match):
        cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(plan=plan))


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"config": "int4_weight_only", "version": 2}, ValueError, "version must be 1, got version=2: a later lowbit wrote it"),
        ({"config": "int4_weight_only", "bits": 4}, ValueError, "fields must be config, modules_to_not_convert, plan, embeddings, head, activations, fuse, calibration, tokenizer, version; got bits"),
        ({"config": "int5_weight_only"}, ValueError, "must begin with one of float_weight"),
        ({"config": 4}, TypeError, "must be a configuration"),
        ({}, ValueError, "config must name a format if plan and embeddings are not given"),
    ],
)
def test_a_configuration_that_is_none_is_refused(fields, error, match):
    with pytest.raises(error, match=match):
        lowbit.LowbitConfig.from_dict({"quant_method": "lowbit", **fields})


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8)).save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    state = safetensors.load_file(file)
    state["model.layers.1.mlp.up_proj.layout"][0] = 99
    safetensors.save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight must be .* layout version 99, known are 1 to"):
        cls.from_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"]["version"] = 7
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="LowbitConfig: version must be 1, got version=7"):
        cls.from_pretrained(tmp_path / "packed")


def test_devices_without_kernels_are_refused_and_auto_is_the_cpu(tmp_path, subtests):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    config = lowbit.LowbitConfig(W4A8)
    wanted = logits(cls.from_pretrained(folder, quantization_config=config))
    for device_map in ("auto", "cpu", {"": "cpu"}):
        with subtests.test(device_map=device_map):
            assert torch.equal(logits(cls.from_pretrained(folder, quantization_config=config, device_map=device_map)), wanted)
    for device in ("disk", "cuda:0"):
        with (
            subtests.test(device=device),
            pytest.raises(ValueError, match=f"must put every module where lowbit has kernels, got '{device}' for 'lm_head' \\("),
        ):
            cls.from_pretrained(folder, quantization_config=config, device_map={"model": "cpu", "lm_head": device})


def test_weights_that_are_not_finite_are_refused(tmp_path, caplog):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    model = cls.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.inf
    model.save_pretrained(folder)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8))


def test_a_layer_of_another_size_stays_float_and_is_begun_anew(tmp_path):
    folder = save("bert", tmp_path)
    config = transformers.BertConfig.from_pretrained(folder, intermediate_size=80)
    loaded = transformers.BertForMaskedLM.from_pretrained(
        folder, config=config, ignore_mismatched_sizes=True, quantization_config=lowbit.LowbitConfig(W4A8)
    )
    odd = loaded.bert.encoder.layer[0].intermediate.dense
    assert type(odd) is torch.nn.Linear and odd.weight.std() > 0
    note = {row.layer: row.note for row in loaded.hf_quantizer.report.skipped}["bert.encoder.layer.0.intermediate.dense"]
    assert note == "its weight in the checkpoint has another shape"
    assert logits(loaded).isfinite().all()


def test_dequantize_brings_linear_layers_back(tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(lowbit.int8_weight_only()))
    wanted = logits(loaded)
    loaded = loaded.dequantize()
    assert layers(loaded) == [] and not hasattr(loaded, "hf_quantizer")
    torch.testing.assert_close(logits(loaded), wanted, rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(cls.from_pretrained(tmp_path / "again")), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [cls() for cls in DENSE], ids=lambda config: config.function)
def test_adapters_train_and_merge(config, tmp_path):
    peft = pytest.importorskip("peft")
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(config, head=None))
    adapted = [name for name in layers(loaded) if name != "lm_head"]  # "all-linear" leaves the head
    packed = [loaded.get_submodule(name).weight.clone() for name in adapted]
    model = peft.get_peft_model(peft.prepare_model_for_kbit_training(loaded), peft.LoraConfig(r=4, target_modules="all-linear"))
    ids, optimizer = torch.arange(28).view(4, 7), torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    wanted = logits(model.eval())
    merged = model.merge_and_unload()
    assert adapted and set(adapted) < set(layers(merged))
    assert not any(torch.equal(merged.get_submodule(name).weight, old) for name, old in zip(adapted, packed, strict=True))
    bound = 0.4 if _C.FORMAT_FACTS[config.spec(torch.float32).format]["bits"] == 4 else 0.05
    assert (logits(merged) - wanted).norm() < bound * wanted.norm()
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(cls.from_pretrained(tmp_path / "merged")), logits(merged))


def test_a_program_that_never_names_lowbit_loads_a_checkpoint(python: Callable[..., str], tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    loaded = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(W4A8))
    loaded.save_pretrained(tmp_path / "packed")
    code = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model.model.layers[0].mlp.up_proj).__name__, "trainer" in str([name for name in sys.modules if name.startswith("transformers.trainer")]))
"""
    assert python(code, str(tmp_path / "packed")).split()[0] == "QuantLinear"


@pytest.mark.parametrize(("version", "match"), [(None, "which is not installed"), ("4.57.1", "got 4.57.1")])
def test_a_missing_or_old_transformers_is_told_and_breaks_nothing_else(
    python: Callable[..., str], version: str | None, match: str, tmp_path
):
    blocked = "sys.modules['transformers'] = None"
    if version is not None:
        (tmp_path / "transformers" / "utils").mkdir(parents=True)
        (tmp_path / "transformers" / "__init__.py").write_text(f"__version__ = {version!r}")
        (tmp_path / "transformers" / "utils" / "quantization_config.py").write_text("QuantizationConfigMixin = object")
        blocked = f"sys.path.insert(0, {str(tmp_path)!r})"
    code = f"""
import sys
{blocked}
import lowbit
lowbit.int4_weight_only()
try:
    lowbit.LowbitConfig
except ImportError as error:
    print(error)
"""
    text = python(code)
    assert "lowbit.LowbitConfig needs transformers 5 or later" in text and match in text


def test_the_peak_of_memory_is_that_of_the_packed_model(python: Callable[..., str], tmp_path):
    """At most 1.15 x the packed model + the largest tensor of the checkpoint, above what is there before."""
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8, dtype="bfloat16"
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)  # 140 MB
    code = """
import sys, torch, transformers, lowbit
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
small = transformers.LlamaConfig(vocab_size=9, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
transformers.LlamaForCausalLM(small).save_pretrained(sys.argv[2])
config = lowbit.LowbitConfig(sys.argv[3])
transformers.LlamaForCausalLM.from_pretrained(sys.argv[2], quantization_config=config)  # imports and first calls
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
model = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1], quantization_config=config)
peak = status("VmHWM") - before
packed = sum(t.nbytes for group in (model.parameters(), model.buffers()) for t in group)
print(peak, packed)
"""
    for format in ("int4_weight_only(group_size=32)", "int8_weight_only()"):
        peak, packed = map(int, python(code, str(tmp_path), str(tmp_path / "small"), format).split()[-2:])
        assert peak <= 1.15 * packed + 4096 * 1024 * 2, f"{format}: {peak / 1e6:.1f} MB for {packed / 1e6:.1f} MB"


@pytest.mark.parametrize("config", [lowbit.int4_weight_only(32), lowbit.int8_weight_only(), W4A8], ids=str)
def test_a_configuration_itself_is_a_quantization_config(config, tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    loaded = cls.from_pretrained(folder, quantization_config=config)
    wanted = cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig(config))
    assert layers(loaded) == layers(wanted) and torch.equal(logits(loaded), logits(wanted))
    assert isinstance(loaded.config.quantization_config, lowbit.LowbitConfig)
    assert loaded.config.quantization_config == wanted.config.quantization_config
    loaded.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(cls.from_pretrained(tmp_path / "packed")), logits(loaded))


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"modules_to_not_convert": ["lm_heat"]}, ValueError, "modules_to_not_convert must match .*, got 'lm_heat'; the nearest is lm_head"),
        ({"modules_to_not_convert": ["lm_head", "model.norm"]}, ValueError, "modules_to_not_convert must match .*, got 'model.norm'"),
        ({"modules_to_not_convert": "lm_head"}, TypeError, "modules_to_not_convert must be a list of names, got 'lm_head'"),
        ({"plan": {"model.layers.0.mlp.upproj": None}}, ValueError, "plan must name .*; the nearest are model.layers.0.mlp.up_proj"),
        ({"embedding": "int8_weight_only"}, ValueError, "fields must be .*; got embedding; the nearest is embeddings"),
    ],
)
def test_names_that_are_not_there_are_refused_with_the_nearest(fields, error, match, tmp_path):
    cls, folder = transformers.LlamaForCausalLM, save("llama", tmp_path)
    with pytest.raises(error, match=f"LowbitConfig: {match}"):
        cls.from_pretrained(folder, quantization_config=lowbit.LowbitConfig("int8_weight_only", **fields))


def test_the_report_says_how_embeddings_are_packed_where_they_are_half_of_the_model(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, tie_word_embeddings=False
    )
    cls = transformers.LlamaForCausalLM
    model = cls(config)
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path, quantization_config=lowbit.int8_weight_only())
    for report in (loaded.hf_quantizer.report, lowbit.quantize_(model, "int8_weight_only")):
        assert [(weight.name, weight.packable) for weight in report.left] == [("model.embed_tokens.weight", True)]
        assert "% of the model; quantize_(model, lowbit.int8_weight_only(), lambda module, name: isinstance(" in str(report)
    packed = lowbit.quantize_(model, lowbit.int8_weight_only(), lambda module, name: isinstance(module, torch.nn.Embedding))
    assert "of the model; quantize_" not in str(packed)
    both = cls.from_pretrained(tmp_path, quantization_config=lowbit.LowbitConfig("int8_weight_only", embeddings="int8_weight_only"))
    assert "of the model; quantize_" not in str(both.hf_quantizer.report)
