# SPDX-License-Identifier: Apache-2.0
"""LoRA of peft in fused models: a token stays one run, and all that peft can change counts, in the next call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import MODELS, calls_of_layers, logits, made, prompt
from torch import Tensor, nn

import lowbit
from lowbit.models.layer_program import LayerProgram
from lowbit.models.steps import KeptPrograms

peft = pytest.importorskip("peft")

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
ALL = "all-linear"


def adapted(model: nn.Module, name: str = "default", seed: int = 1, **options: Any) -> nn.Module:
    """The model with an adapter of random numbers of a size that counts."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ALL, "init_lora_weights": False} | options)
    model = model.add_adapter(name, config) or model if hasattr(model, "peft_config") else peft.get_peft_model(model, config, name)
    return model.eval()


def pair(name: str = "llama", order: str = "adapter first", more: dict[str, Any] | None = None, **options: Any) -> list[nn.Module]:
    """A fused model with an adapter, and the same that is not fused."""
    model, other = (made(name, **(more or {})) for _ in range(2))
    if order == "fuse first":
        lowbit.fuse(model)
    model, other = adapted(model, **options), adapted(other, **options)
    if order == "adapter first":
        lowbit.fuse(model)
    return [model, other]


def same(model: nn.Module, other: nn.Module, **bounds: float) -> Tensor:
    """Both give the same, in a prompt, in padding and in tokens; returns what."""
    ids, mask = prompt(), torch.ones_like(prompt())
    mask[1, :3] = 0
    got = logits(model, ids)
    torch.testing.assert_close(got, logits(other, ids), **bounds or CLOSE)
    torch.testing.assert_close(logits(model, ids, attention_mask=mask)[:, 3:], logits(other, ids, attention_mask=mask)[:, 3:], **bounds or CLOSE)
    assert torch.equal(answer(model, ids), answer(other, ids))
    return got


def answer(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    options = {"do_sample": False, "max_new_tokens": 8, "attention_mask": torch.ones_like(ids)} | options
    return model.generate(input_ids=ids, min_new_tokens=options["max_new_tokens"], **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_stays_one_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = pair(name)
    with calls_of_layers(monkeypatch) as counts:
        answer(model, prompt(), max_new_tokens=4)
    assert counts == [2] * 4
    got = same(model, other)
    with model.disable_adapter():
        assert not torch.allclose(logits(model, prompt()), got, atol=1e-2), "it changes nothing"


@pytest.mark.parametrize("order", ["adapter first", "fuse first"])
@pytest.mark.parametrize("config", ["int8", "w4a8"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["up_proj"], ["k_proj", "o_proj", "gate_proj"], ["lm_head", "down_proj"]], ids=" ".join)
def test_adapters_of_some_layers(targets: list[str], config: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {} if config == "int8" else {"rtol": 0.02, "atol": 0.02}  # codes of activations differ by one, here and there
    model, other = pair("llama", order, {"config": config}, target_modules=targets, rank_pattern={"v_proj": 7, "gate_proj": 20})
    torch.testing.assert_close(logits(model, prompt()), logits(other, prompt()), **bounds or CLOSE)
    with calls_of_layers(monkeypatch) as counts:
        answer(model, prompt(), max_new_tokens=4)
    assert counts == [2] * 4


@torch.no_grad()
def test_beside_float64() -> None:
    model, other = pair("qwen2")
    lowbit.dequantize_(other)
    wanted = other.double()(prompt()).logits
    got = model(prompt()).logits.double()
    assert (got - wanted).norm() < 1e-6 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_models_and_adapters_in_16_bits(dtype: torch.dtype) -> None:
    model, other, exact = (adapted(made("llama").to(dtype)) for _ in range(3))
    lowbit.fuse(model)
    lowbit.dequantize_(exact)
    wanted = exact.double()(prompt()).logits
    error, by_peft = ((one(prompt()).logits.double() - wanted).norm() for one in (model, other))
    assert error < 1.5 * by_peft


def layer(model: nn.Module, name: str = "self_attn.q_proj") -> Any:
    return model.get_base_model().model.layers[1].get_submodule(name)


def trained(model: nn.Module) -> None:
    """A step of an optimizer, which writes into the factors."""
    factors = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    for parameter in factors:
        parameter.requires_grad_(True)
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(factors, lr=0.02).step()


def second(model: nn.Module, **options: Any) -> None:
    adapted(model, "second", 2, **options)


def both(model: nn.Module) -> None:
    second(model, r=3)
    model.base_model.set_adapter(["default", "second"])


def switched(model: nn.Module) -> None:
    second(model, target_modules=["v_proj", "up_proj"])
    model.set_adapter("second")


def deleted(model: nn.Module) -> None:
    switched(model)
    logits(model, prompt())
    model.delete_adapter("default")


def of_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Other factors, of another dtype."""
    trained(model)
    for name, each in model.named_modules():
        if name.endswith(("lora_A.default", "lora_B.default")):
            each.to(dtype)


def hooked(model: nn.Module) -> None:
    layer(model).lora_A["default"].register_forward_hook(lambda m, a, y: y * 2)


def in_place(model: nn.Module) -> None:
    layer(model)._active_adapter = names = ["default"]
    logits(model, prompt())
    names.clear()


CHANGES: dict[str, tuple[bool, Callable[[nn.Module], Any]]] = {
    "another adapter": (True, switched),
    "two adapters at once": (True, both),
    "an adapter is deleted": (True, deleted),
    "a scaling": (True, lambda model: layer(model).set_scale("default", 3.0)),
    "all scalings": (True, lambda model: [each.scale_layer(0.25) for each in model.modules() if hasattr(each, "scale_layer")]),
    "merged": (True, lambda model: model.merge_adapter()),
    "merged and taken off": (True, lambda model: (model.merge_adapter(), logits(model, prompt()), model.unmerge_adapter(), layer(model).set_scale("default", 2.0))),
    "disabled": (True, lambda model: model.base_model.disable_adapter_layers()),
    "disabled in one layer": (True, lambda model: layer(model).enable_adapters(False)),
    "trained": (True, trained),
    "written into .data": (True, lambda model: layer(model).lora_B["default"].weight.data.mul_(3.0)),
    "another factor": (True, lambda model: setattr(layer(model).lora_B["default"], "weight", nn.Parameter(torch.ones(64, 4)))),
    "factors of 16 bits": (True, lambda model: of_dtype(model, torch.bfloat16)),
    "factors of float64": (False, lambda model: of_dtype(model, torch.float64)),
    "DoRA": (False, lambda model: (second(model, use_dora=True), model.set_adapter("second"))),
    "biases of LoRA": (False, lambda model: (second(model, lora_bias=True), model.set_adapter("second"))),
    "a hook on a factor": (False, hooked),
    "a hook on the layer": (False, lambda model: layer(model).register_forward_hook(lambda m, a, y: y * 2)),
    "a hook on the base layer": (False, lambda model: layer(model).base_layer.register_forward_hook(lambda m, a, y: y * 2)),
    "its list of names": (True, in_place),
    "another forward": (False, lambda model: setattr(layer(model), "forward", lambda x: layer(model).base_layer(x) * 2)),
    "an embedding": (True, lambda model: (second(model, target_modules=["embed_tokens", "q_proj"]), model.set_adapter("second"))),
    "unloaded": (True, lambda model: model.unload()),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_run, change_it = CHANGES[change]
    model, other = pair("llama")
    before = same(model, other)
    for one in (model, other):
        with torch.no_grad():
            change_it(one)
    bounds = {"rtol": 2e-2, "atol": 2e-2} if "16 bits" in change else CLOSE  # peft rounds x, too
    for _ in range(2):
        torch.testing.assert_close(logits(model, prompt()), logits(other, prompt()), **bounds)
    assert not torch.allclose(logits(model, prompt()), before, atol=1e-3), "it changes nothing"
    with calls_of_layers(monkeypatch) as counts:
        text = answer(model, prompt(), max_new_tokens=4)
    assert (counts == [2] * 4) == in_one_run
    if bounds is CLOSE:
        assert torch.equal(text, answer(other, prompt(), max_new_tokens=4))


def test_switching_packs_no_weight_of_the_base() -> None:
    model, other = pair("llama")
    both(model), both(other)
    same(model, other)
    packed = [module.weight.data_ptr() for module in model.modules() if type(module) is lowbit.QuantLinear]
    joined = [module.facts["merged"].weight for module in model.modules() if "merged" in getattr(module, "facts", {})]
    for name in ("second", "default", "second"):
        model.set_adapter(name), other.set_adapter(name)
        same(model, other)
    assert packed == [module.weight.data_ptr() for module in model.modules() if type(module) is lowbit.QuantLinear]
    now = [module.facts["merged"].weight for module in model.modules() if "merged" in getattr(module, "facts", {})]
    assert joined and all(one is its for one, its in zip(now, joined, strict=True))


def test_dropout_in_training_runs_as_before() -> None:
    model, other = pair("llama", lora_dropout=0.5)
    same(model, other)
    for one in (model, other):
        layer(one).lora_dropout["default"].train()
    results = []
    for one in (model, other):
        torch.manual_seed(3)
        results.append(logits(one, prompt()))
    torch.testing.assert_close(*results, **CLOSE)
    assert not torch.equal(logits(model, prompt()), results[0]), "dropout is drawn anew"


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_a_model_that_is_not_fused(training: bool) -> None:
    gradients = []
    for one in pair("llama"):
        one.train(training)
        one(prompt(), labels=prompt()).loss.backward()
        gradients.append([parameter.grad for name, parameter in one.named_parameters() if "lora_" in name])
    assert all(gradient is not None for gradient in gradients[0]) and len(gradients[0]) == 2 * 2 * 7
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_copies_are_fused_and_have_adapters_of_their_own(copied: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = pair("llama")
    wanted = same(model, other)
    twin = copied(model)
    trained(twin), trained(other)
    same(twin, other)
    assert torch.equal(logits(model, prompt()), wanted)
    with calls_of_layers(monkeypatch) as counts:
        answer(twin, prompt(), max_new_tokens=4)
    assert counts == [2] * 4


def test_products_of_other_formats_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v that cannot be joined, as in files of Q4_K_M."""
    model, other = (made("llama") for _ in range(2))
    for one in (model, other):
        for each in one.model.layers:
            torch.manual_seed(6)
            each.self_attn.v_proj = lowbit.QuantLinear.from_linear(nn.Linear(64, 32, bias=False), lowbit.int4_weight_only(32).spec(torch.float32))
    model, other = adapted(model), adapted(other)
    lowbit.fuse(model)
    ids = prompt(1)
    torch.testing.assert_close(logits(model, ids), logits(other, ids), **CLOSE)
    with calls_of_layers(monkeypatch) as counts:
        text = answer(model, ids, max_new_tokens=4)
    assert counts == [2] * 3 and torch.equal(text, answer(other, ids, max_new_tokens=4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_dora": True}, "its adapter 'default' is DoraLinearVariant, more than A and B"),
        ({"lora_bias": True}, "its adapter 'default' is no pair of linear layers without bias"),
    ],
    ids=str,
)
def test_the_report_names_what_is_left_to_peft(options: dict[str, Any], text: str) -> None:
    model = adapted(made("llama"), target_modules=["q_proj"], **options)
    report = lowbit.fuse(model)
    (name,) = {name for name in report.left if name.endswith("layers.0.self_attn.q_proj")}
    assert report.left[name] == text and any(name.endswith("layers.0.self_attn") for name in report)


def test_the_report_names_adapters_of_other_methods_and_layers() -> None:
    model = peft.get_peft_model(made("llama"), peft.LoHaConfig(target_modules=["q_proj"], init_weights=False)).eval()
    report = lowbit.fuse(model)
    assert any("an adapter of peft (loha) over QuantLinear" in reason for reason in report.left.values())
    assert any("q_proj has an adapter of peft over QuantLinear that is no LoRA" in reason for reason in report.left.values())
    other = adapted(made("llama"), target_modules=["embed_tokens", "q_proj"])
    report = lowbit.fuse(other)
    (reason,) = {reason for name, reason in report.left.items() if name.endswith("embed_tokens")}
    assert "(lora) over Embedding; fused calls add LoRA over a QuantLinear" in reason


def test_adapters_of_float_layers_are_named_and_computed_by_peft() -> None:
    models = []
    for fused in (True, False):
        model = made("llama")
        lowbit.dequantize_(model.model.layers[1].self_attn)
        model = adapted(model)
        if fused:
            report = lowbit.fuse(model)
            assert any("over Linear that is no LoRA over a QuantLinear" in reason for reason in report.left.values())
        models.append(model)
    same(*models)


def test_rows_of_a_batch_with_adapters_of_their_own() -> None:
    """peft hooks the layers then, which a fused call must not skip."""
    model, other = pair("llama")
    second(model), second(other)
    with torch.no_grad():
        got, wanted = (one(prompt(), adapter_names=["default", "second"]).logits for one in (model, other))
        torch.testing.assert_close(got, wanted, **CLOSE)
    same(model, other)


def test_switching_back_takes_the_program_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = pair("llama")
    second(model), second(other)
    written: list[int] = []
    init = LayerProgram.__init__

    def counted(self: LayerProgram, layers: Any = (), *args: Any, **more: Any) -> None:
        written.extend([1] if layers else [])  # TokenRun begins with an empty one
        init(self, layers, *args, **more)

    monkeypatch.setattr(LayerProgram, "__init__", counted)
    for name in ("default", "second", "default", "second"):
        model.set_adapter(name), other.set_adapter(name)
        assert torch.equal(answer(model, prompt()), answer(other, prompt()))
    assert len(written) == 4, "the model's and that of tokens, for each adapter"
    model.merge_adapter()
    answer(model, prompt())
    kept = [module.facts["kept"] for module in model.modules() if isinstance(getattr(module, "facts", {}).get("kept"), KeptPrograms)]
    assert max(len(each._programs) for each in kept) == 1, "programs of weights that are gone are let go"
