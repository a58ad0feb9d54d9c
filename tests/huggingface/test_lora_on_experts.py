# SPDX-License-Identifier: Apache-2.0
"""LoRA on packed experts (peft's target_parameters): the same numbers and gradients as peft's over the decoded weights,
merged, unmerged, saved; and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from peft.tuners.lora.layer import ParamWrapper  # noqa: E402
from tiny_architectures import tiny_config, tiny_model  # noqa: E402

import lowbit  # noqa: E402
from lowbit import QuantExperts  # noqa: E402

INT8 = lowbit.int8_weight_only()
IDS = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(3))
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES = ["Qwen3Moe", "Mixtral", "GptOss"]


def config(parameters: list[str] = BOTH, **options: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=parameters, **options)


def base(name: str, packed: bool = True) -> nn.Module:
    cls = f"{name}ForCausalLM"
    model = tiny_model(cls, tiny_config(getattr(transformers, cls).config_class))
    if packed:
        lowbit.quantize_(model, INT8)
    return model


def with_adapter(model: nn.Module, **options: Any) -> Any:
    adapted = peft.get_peft_model(model, config(**options))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    return adapted


def decoded(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    lowbit.dequantize_(twin, torch.float32)
    return twin


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids).logits


def gradients(model: Any) -> dict[str, Tensor]:
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or name.endswith(("gate.weight", "router.weight")):
            parameter.requires_grad_(parameter.is_floating_point())
    logits(model).square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def packed_weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for module in model.modules() if isinstance(module, QuantExperts) for value in module.parameters()]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "first", "down"])
def test_numbers_and_gradients_are_those_of_peft_over_the_decoded_weights(name: str, parameters: list[str]) -> None:
    """Of the adapters, the router and the embedding below the experts."""
    model = base(name)
    floats = decoded(model)
    ours, theirs = with_adapter(model, parameters=parameters), with_adapter(floats, parameters=parameters)
    wrappers = [module for module in ours.modules() if isinstance(module, ParamWrapper)]
    assert len(wrappers) == len(parameters) * model.config.num_hidden_layers
    assert any(isinstance(module, QuantExperts) for module in ours.modules())
    plain = logits(base(name))
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)
    assert (logits(ours) - plain).abs().max() > 1e-2, "the adapter does something"
    got, wanted = gradients(ours), gradients(theirs)
    assert got.keys() == wanted.keys() and any("lora_A" in key for key in got) and any("embed" in key for key in got)
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()), msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_and_unmerged(name: str) -> None:
    model = base(name)
    bytes_before = packed_weights(model)
    ours = with_adapter(model)
    apart = logits(ours)
    with lowbit.merging() as report:
        ours.merge_adapter()
    together = packed_weights(ours)
    wrappers = sum(isinstance(module, ParamWrapper) for module in ours.modules())
    assert len(report.rows) == len({row.layer for row in report.rows}) == wrappers
    assert all(row.kept > 0.95 and row.error_db > 30 and row.layer.endswith("proj") for row in report.rows)
    torch.testing.assert_close(logits(ours), apart, rtol=0.05, atol=0.05 * float(apart.abs().max()))
    assert any(not torch.equal(old, new) for old, new in zip(bytes_before, together, strict=True))
    ours.unmerge_adapter()
    assert all(torch.equal(old, new) for old, new in zip(bytes_before, packed_weights(ours), strict=True))
    assert torch.equal(logits(ours), apart)
    with ours.disable_adapter():
        assert torch.equal(logits(ours), logits(base(name)))
    merged = ours.merge_and_unload()
    assert not any(isinstance(module, ParamWrapper) for module in merged.modules())
    assert all(torch.equal(old, new) for old, new in zip(together, packed_weights(merged), strict=True))


def test_a_zero_adapter_changes_no_bit_and_of_a_light_one_most_is_kept() -> None:
    model = base("Qwen3Moe", packed=False)
    lowbit.quantize_(model, lowbit.int4_weight_only(32))
    ours = peft.get_peft_model(model, config())
    before = packed_weights(ours)
    ours.merge_adapter()
    assert all(torch.equal(old, new) for old, new in zip(before, packed_weights(ours), strict=True))
    ours.unmerge_adapter()
    for name, parameter in ours.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) / 100
    with lowbit.merging() as report:
        ours.merge_adapter()
    assert report.rows and all(row.kept > 0.5 and row.format.startswith("int4") for row in report.rows)
    ours.unmerge_adapter()
    for name, parameter in ours.named_parameters():
        parameter.data.mul_(1e-4 if "lora_B" in name else 1)
    with (
        lowbit.merging(format=lowbit.int8_weight_only(32)) as report,
        pytest.raises(ValueError, match=r"merging: format must be None for experts, which keep theirs: .*proj in int4"),
    ):
        ours.merge_adapter()
    assert not report.rows
    assert all(torch.equal(old, new) for old, new in zip(before, packed_weights(ours), strict=True))


def test_a_weight_that_is_loaded_after_a_merge_counts_as_merged() -> None:
    ours = with_adapter(base("Qwen3Moe"))
    ours.merge_adapter()
    (first, *_) = [module for module in ours.modules() if isinstance(module, QuantExperts)]
    state = {name: torch.roll(value, 1, 0) if name.endswith("proj") else value for name, value in first.state_dict().items()}
    loaded = first.dequantize("gate_up_proj").roll(1, 0)
    first.load_state_dict(state)
    ours.unmerge_adapter()
    wrapper = next(module for module in ours.modules() if isinstance(module, ParamWrapper) and module.get_base_layer() is first
                   and module.parameter_name == "gate_up_proj")  # fmt: skip
    wanted = loaded - wrapper.get_delta_weight("default")
    got = first.dequantize("gate_up_proj")
    assert (got - wanted).norm() <= 0.02 * wanted.norm()  # int8, whose errors lie where the adapter reads nothing


def test_a_merge_that_fails_leaves_all_layers_as_they_were() -> None:
    ours = with_adapter(base("Qwen3Moe"))
    before, apart = packed_weights(ours), logits(ours)
    last = [parameter for name, parameter in ours.named_parameters() if "lora_B" in name][-1]
    kept = last.data.clone()
    last.data[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"merge_adapter: .*experts.* cannot be merged, and nothing was: .*expert 0 of \w+ with the adapter must be finite"):
        ours.merge_adapter()
    last.data = kept
    assert all(torch.equal(old, new) for old, new in zip(before, packed_weights(ours), strict=True))
    assert torch.equal(logits(ours), apart)


def test_it_learns_and_is_saved(tmp_path: Path) -> None:
    model = base("Qwen3Moe")
    ours = peft.get_peft_model(model, config())
    torch.testing.assert_close(logits(ours), logits(base("Qwen3Moe")), rtol=1e-4, atol=1e-4)  # B is 0
    optimizer = torch.optim.AdamW([one for one in ours.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = ours(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    ours.eval().save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base("Qwen3Moe"), tmp_path).eval()
    assert torch.equal(logits(again), logits(ours))


def test_experts_that_are_packed_under_an_adapter(tmp_path: Path) -> None:
    ours = with_adapter(base("Qwen3Moe"))
    theirs = with_adapter(base("Qwen3Moe", packed=False))
    lowbit.quantize_(theirs, INT8)
    assert torch.equal(logits(theirs), logits(ours))
    lowbit.dequantize_(theirs, torch.float32)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)


def test_two_adapters(tmp_path: Path) -> None:
    model = base("Qwen3Moe")
    floats = decoded(model)
    ours, theirs = with_adapter(model), with_adapter(floats)
    for adapted in (ours, theirs):
        adapted.add_adapter("other", config())
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and ".other." in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 8
    for active in ("other", ["default", "other"]):
        for adapted in (ours, theirs):
            adapted.base_model.set_adapter(active)
        torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


def test_what_is_refused_is_named() -> None:
    with pytest.raises(ValueError, match=r"target_parameters trains float weights, got .*q_proj as int8"):
        peft.get_peft_model(base("Qwen3Moe"), config(["q_proj.weight"]))
    with pytest.raises(ValueError, match="lora_dropout"):
        peft.get_peft_model(base("Qwen3Moe"), config(lora_dropout=0.1))
    with pytest.raises(ValueError, match=r"init_lora_weights='pissa' reads float weights"):
        peft.get_peft_model(base("Qwen3Moe"), config(init_lora_weights="pissa"))
    ours = with_adapter(base("Qwen3Moe"))
    experts = next(module for module in ours.modules() if isinstance(module, QuantExperts))
    experts.forward = experts.forward
    with pytest.raises(NotImplementedError, match="an adapter's part cannot be added to a forward that was replaced"):
        logits(ours)
