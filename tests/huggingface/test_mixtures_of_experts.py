# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of transformers with packed experts: each class of the installed version that its decorator marks,
and small models of seven families, loaded, saved, generating, and trained by adapters."""

from __future__ import annotations

import copy
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
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"target_parameters trains float weights, got model\.layers\.0\.mlp\.experts as int4 g32"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]))
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
