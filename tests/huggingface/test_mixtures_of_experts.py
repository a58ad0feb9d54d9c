# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of transformers with packed experts: each class of the installed version that its decorator marks,
and small models of seven families, loaded, saved, generating, and trained by adapters."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_architectures import tiny_config, tiny_model  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import lowbit  # noqa: E402
from lowbit import _C, QuantExperts  # noqa: E402
from lowbit.quant.kinds import kind_of  # noqa: E402
from lowbit.quant.quant_experts import EXPERTS  # noqa: E402

MODELS = Path(transformers.__file__).parent / "models"
CLASSES = sorted(
    (f"transformers.models.{path.parent.name}.{path.stem}", name)
    for path in MODELS.glob("*/modeling_*.py")
    for name in re.findall(r"^@use_experts_implementation.*\nclass (\w+)\(", path.read_text(), re.MULTILINE)
)
FAMILIES = ["Qwen3Moe", "Mixtral", "Olmoe", "GptOss", "GraniteMoe", "DeepseekV3", "Glm4Moe"]
INT4 = lowbit.int8_dynamic_activation_int4_weight(group_size=32)
BY_TWO_PRODUCTS = {"Inkling2Experts": "a gate with soft caps", "MuseSparkExperts": "a norm after down_proj", "Step3p7Experts": "a clamp behind silu"}
"""Classes of which the op `experts` does not compute the whole, and why."""
IDS = torch.randint(0, 128, (2, 11), generator=torch.Generator().manual_seed(3))


def experts_of(module: str, name: str) -> Any:
    """An experts module of this class with the small sizes of a configuration of its file."""
    home = __import__(module, fromlist=[name])
    configs = [value for value in vars(home).values() if inspect.isclass(value) and issubclass(value, transformers.PreTrainedConfig)]
    family = Path(home.__file__).parent.name
    configs += [CONFIG_MAPPING[kind] for kind in CONFIG_MAPPING if kind.replace("-", "_").startswith(family)]
    for config, sizes in itertools.product(configs, ({}, {"intermediate_size": 32})):
        try:
            experts = getattr(home, name)(tiny_config(config), **sizes)
        except Exception:  # of a configuration of something else
            continue
        torch.manual_seed(0)
        for parameter in experts.parameters():
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
        return experts.float().eval()
    raise AssertionError(f"no configuration of {module} makes {name}")


def test_the_decorator_marks_as_many_classes_as_are_known() -> None:
    assert len(CLASSES) == 65


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=[name for _, name in CLASSES])
@torch.no_grad()
def test_each_class_of_experts_computes_with_packed_weights(module: str, name: str) -> None:
    experts = experts_of(module, name)
    cls, before = type(experts), copy.deepcopy(experts)
    assert kind_of(experts) is EXPERTS
    report = lowbit.quantize_(experts, lowbit.int8_weight_only())
    assert type(experts) is QuantExperts and [row.note for row in report.rows] == ["", ""], report
    assert (experts.op_gate is None) == (name in BY_TWO_PRODUCTS)
    _, _, k = EXPERTS.weights(experts)[0].shape
    x = 2 * torch.randn(9, k)
    index = torch.rand(9, experts.form.experts).argsort(-1)[:, :2]
    weights = torch.rand(9, 2)
    y = experts(x, index, weights)
    op = "experts" if experts.op_gate is not None else "gather_linear"
    assert {row.kernel for row in report.rows} == {_C.last_kernel(op)}
    decoded = copy.deepcopy(experts)
    lowbit.dequantize_(decoded)
    assert type(decoded) is cls and decoded.state_dict().keys() == before.state_dict().keys()
    plain = inspect.unwrap(cls.forward)
    wanted = plain(decoded.double(), x.double(), index, weights.double())
    assert (y - wanted).norm() <= 2e-6 * wanted.norm()  # roundings of float32 in sums of some 100 terms
    float_result = plain(before, x, index, weights)
    assert 1e-4 < (y - float_result).norm() / float_result.norm() < 0.03
    index[::3, 1] = experts.form.experts
    some = index < experts.form.experts
    wanted = plain(decoded, x.double(), index.where(some, 0), weights.where(some, 0).double())
    assert (experts(x, index, weights) - wanted).norm() <= 2e-6 * wanted.norm()


def family(name: str) -> Any:
    cls = f"{name}ForCausalLM"
    return tiny_model(cls, tiny_config(getattr(transformers, cls).config_class))


def experts_in(model: nn.Module) -> Iterator[QuantExperts]:
    return (module for module in model.modules() if isinstance(module, QuantExperts))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_model_is_the_model_of_the_decoded_weights(name: str) -> None:
    model = family(name)
    report = lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    assert [*experts_in(model)] and not any("experts" in weight.name for weight in report.left)
    decoded = copy.deepcopy(model)
    lowbit.dequantize_(decoded)
    assert not [*experts_in(decoded)]
    decoded.set_experts_implementation("eager")  # torch's grouped products take no float64
    wanted = logits(decoded.double())
    assert (logits(model) - wanted).norm() <= 2e-5 * wanted.norm()  # two layers and a head in float32
    answer = model.generate(IDS)
    assert answer.shape == (2, 17) and torch.equal(answer, decoded.float().generate(IDS))


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_saved_and_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = family(name)
    model.save_pretrained(tmp_path / "float")
    lowbit.quantize_(model, INT4)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "packed")
    cls = type(model)
    loaded = cls.from_pretrained(tmp_path / "packed").eval()
    assert torch.equal(logits(loaded), wanted) and len([*experts_in(loaded)]) == len([*experts_in(model)])
    fresh = family(name)
    lowbit.load(fresh, model.state_dict())
    assert torch.equal(logits(fresh), wanted)
    config = lowbit.LowbitConfig(INT4, modules_to_not_convert=[])
    read = cls.from_pretrained(tmp_path / "float", quantization_config=config).eval()
    assert torch.equal(logits(read), wanted)
    lines = [(row.layer, row.format, row.shape, row.error_db) for row in read.hf_quantizer.report.quantized]
    assert [line for line in lines if "experts" in line[0]]
    read.save_pretrained(tmp_path / "again")
    again = cls.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(logits(again), wanted)
    back = cls.from_pretrained(tmp_path / "packed")
    lowbit.dequantize_(back)
    back.save_pretrained(tmp_path / "back")
    assert not [*experts_in(cls.from_pretrained(tmp_path / "back"))]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_quantize_checkpoint_is_what_from_pretrained_makes(name: str, tmp_path: Path) -> None:
    model = family(name)
    model.save_pretrained(tmp_path / "float", max_shard_size="60KB")
    report = lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", INT4)
    wanted = type(model).from_pretrained(tmp_path / "float", quantization_config=lowbit.LowbitConfig(INT4)).eval()
    loaded = type(model).from_pretrained(tmp_path / "packed").eval()
    assert torch.equal(logits(loaded), logits(wanted)) and [*experts_in(loaded)]
    assert [row.layer for row in report.quantized] == [row.layer for row in wanted.hf_quantizer.report.quantized]


@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_on_attention_learn_through_packed_experts(name: str) -> None:
    peft = pytest.importorskip("peft")
    model = family(name)
    lowbit.quantize_(model, lowbit.int4_weight_only(group_size=32))
    packed = [experts.down_proj.clone() for experts in experts_in(model)]
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["o_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(a, b.down_proj) for a, b in zip(packed, experts_in(model), strict=True))


def test_gradients_reach_the_first_layer_and_the_router_as_in_the_float_model() -> None:
    model = family("Qwen3Moe")
    lowbit.quantize_(model, lowbit.int8_weight_only())
    decoded = copy.deepcopy(model)
    lowbit.dequantize_(decoded)
    for one in (model, decoded):
        one(IDS, labels=IDS).loss.backward()
    for key in ("model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"):
        got, wanted = (one.get_parameter(key).grad for one in (model, decoded))
        assert (got - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_a_plan_of_autoquant_packs_experts_in_a_checkpoint_too(name: str, tmp_path: Path) -> None:
    """GptOss has transposed weights, alternating rows, biases and other names of its arguments."""
    model = family(name)
    plan = lowbit.autoquant(model, {"input_ids": IDS}, candidates=[lowbit.int8_weight_only()], min_sqnr=None, cache=False)
    experts = {row.layer: row for row in plan.rows if row.layer.endswith("experts")}
    assert len(experts) == model.config.num_hidden_layers and all(row.calls for row in experts.values())
    spec = lowbit.int8_weight_only().spec(torch.float32)  # whatever was faster here
    for number, row in enumerate(plan.rows):
        if row.layer in experts:
            plan.rows[number] = dataclasses.replace(row, spec=spec)
    plan.save(tmp_path / "plan.json")
    model.save_pretrained(tmp_path / "float")
    lowbit.quantize_checkpoint(tmp_path / "float", tmp_path / "packed", plan=tmp_path / "plan.json", head=None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    plan.apply(model)
    assert len([*experts_in(loaded)]) == len([*experts_in(model)]) == len(experts)
    assert torch.equal(logits(loaded), logits(model))


def test_names_choose_what_stays_float(tmp_path: Path) -> None:
    family("Mixtral").save_pretrained(tmp_path)
    cls = transformers.MixtralForCausalLM
    first = "model.layers.0.mlp.experts"
    kept = cls.from_pretrained(tmp_path, quantization_config=lowbit.LowbitConfig(INT4, ["layers.0.mlp.experts"]))
    assert [type(layer.mlp.experts) is QuantExperts for layer in kept.model.layers] == [False, True]
    planned = cls.from_pretrained(tmp_path, quantization_config=lowbit.LowbitConfig(plan={first: "int8_weight_only()"}))
    (experts,) = experts_in(planned)
    assert experts is planned.model.layers[0].mlp.experts and experts.spec.name == "int8 per-channel"
    for model in (kept, planned):
        model.eval().save_pretrained(tmp_path / "packed")
        assert torch.equal(logits(cls.from_pretrained(tmp_path / "packed").eval()), logits(model))


def test_packed_experts_are_refused_by_name_where_float_ones_are_wanted(tmp_path: Path) -> None:
    model = family("Mixtral")
    lowbit.quantize_(model, INT4)
    with pytest.raises(ValueError, match=r"export: model\.layers\.0\.mlp\.experts must be a linear layer or an embedding, got a module of experts"):
        lowbit.export.onnx.export(model, (IDS,), tmp_path / "model.onnx")


def test_tensors_of_a_file_are_those_of_the_modules(tmp_path: Path) -> None:
    model = family("GptOss")
    lowbit.quantize_(model, INT4)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        keys = {key.rpartition(".")[2] for key in file.keys() if "layers.0.mlp.experts" in key}  # noqa: SIM118
    weights = {"gate_up_proj", "down_proj"}
    assert keys == weights | {f"{key}_bias" for key in weights} | {f"{key}_layout" for key in weights}


def separate(folder: Path) -> dict[str, Tensor]:
    """Write a Qwen3Moe with one tensor for each matrix of an expert, and return the tensors."""
    family("Qwen3Moe").save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert "model.layers.0.mlp.experts.1.gate_proj.weight" in tensors
    return tensors


def loaded(folder: Path) -> Any:
    config = lowbit.LowbitConfig("int8_weight_only()", head=None)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "DeepseekV3"])
def test_separate_experts_are_packed_one_by_one_as_quantize_packs_merged_ones(name: str, tmp_path: Path) -> None:
    model = family(name)
    model.save_pretrained(tmp_path)
    merges = []
    stack = torch.stack

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        merges.append(len(tensors))
        return stack(tensors, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "stack", counted)
        packed = loaded(tmp_path)
    assert merges and max(merges) == 1, "no two experts are stacked"
    report = lowbit.quantize_(model, lowbit.int8_weight_only(), head=None)
    ours, wanted = packed.state_dict(), model.state_dict()
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[key], wanted[key]) for key in wanted)
    rows = {row.layer: row for row in packed.hf_quantizer.report.quantized}
    assert rows.keys() == {row.layer for row in report.quantized}
    for row in report.quantized:
        assert (rows[row.layer].bytes_before, rows[row.layer].bytes_after) == (row.bytes_before, row.bytes_after)
        assert rows[row.layer].error_db == pytest.approx(row.error_db, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("one matrix", r"must have the \d+ experts of model\.layers\.0\.mlp\.experts, got not all tensors of expert 1 for gate_up_proj"),
        ("an expert", r"must have the \d+ experts of model\.layers\.0\.mlp\.experts, got not all tensors of expert 1 for "),
        ("one more", r"must have the \d+ experts of model\.layers\.0\.mlp\.experts, got \d+ tensors in place of \d+ for "),
        ("another shape", r"expert 1 of model\.layers\.0\.mlp\.experts\.down_proj must have shape \[.*\], got \[.*\] in the checkpoint"),
        ("nan", r"expert 1 of model\.layers\.0\.mlp\.experts\.gate_up_proj must be finite, got inf or nan"),
    ],
)
def test_a_checkpoint_with_a_broken_expert_is_refused_by_its_number(change: str, text: str, tmp_path: Path) -> None:
    tensors = separate(tmp_path)
    first = "model.layers.0.mlp.experts."
    count = sum(name.startswith(first) and name.endswith("up_proj.weight") for name in tensors)
    if change == "one matrix":
        del tensors[f"{first}1.up_proj.weight"]
    elif change == "an expert":
        tensors = {name: value for name, value in tensors.items() if not name.startswith(f"{first}1.")}
    elif change == "one more":
        tensors |= {f"{first}{count}.{key}_proj.weight": tensors[f"{first}0.{key}_proj.weight"].clone() for key in ("gate", "up", "down")}
    elif change == "another shape":
        tensors[f"{first}1.down_proj.weight"] = tensors[f"{first}1.down_proj.weight"][:, :-1].contiguous()
    else:
        tensors[f"{first}1.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=text):
        loaded(tmp_path)


def test_the_peak_of_memory_is_that_of_the_packed_experts(python: Any, tmp_path: Path) -> None:
    """At most 1.15 x the packed model above what is there before, and 24 MB in which one expert is packed: it has 8 MB in
    float32, and the search for scales as much again twice. All experts of a layer have 50 MB as they are stored."""
    sizes = {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(
        **sizes, hidden_size=1024, intermediate_size=1024, moe_intermediate_size=1024, num_hidden_layers=3, num_experts=8, dtype="bfloat16"
    )
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)  # 160 MB, 50 of them a layer's experts
    small = transformers.Qwen3MoeConfig(**sizes, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1, num_experts=4)
    transformers.Qwen3MoeForCausalLM(small).save_pretrained(tmp_path / "small")
    code = """
import sys, torch, transformers, lowbit
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
config, cls = lowbit.LowbitConfig(sys.argv[3]), transformers.Qwen3MoeForCausalLM
cls.from_pretrained(sys.argv[2], quantization_config=config)  # imports and first calls
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
model = cls.from_pretrained(sys.argv[1], quantization_config=config)
peak = status("VmHWM") - before
print(peak, sum(t.nbytes for group in (model.parameters(), model.buffers()) for t in group))
"""
    for format in ("int4_weight_only(group_size=32)", "int8_weight_only()"):
        freed = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # what is freed does not stay with malloc
        peak, packed = map(int, python(code, str(tmp_path), str(tmp_path / "small"), format, **freed).split()[-2:])
        assert peak <= 1.15 * packed + 24e6, f"{format}: {peak / 1e6:.1f} MB for {packed / 1e6:.1f} MB"
