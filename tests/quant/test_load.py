# SPDX-License-Identifier: Apache-2.0
"""load: what was saved of a quantized model comes back into a float one, on the cpu or the meta device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit
from lowbit.quant import QuantLinear


def build(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(
            nn.Linear(100, 33),
            nn.ReLU(),
            nn.Sequential(nn.Linear(33, 65, bias=False), nn.Tanh(), nn.Linear(65, 7)),
            nn.LayerNorm(7),
        )


def saved(model: nn.Module, path: Path) -> Path:
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_file_comes_back_bit_for_bit(config, model, x, tmp_path, suffix, device):
    model = nn.Sequential(*model, nn.LayerNorm(7))
    lowbit.quantize_(model, config)
    file = saved(model, tmp_path / f"model{suffix}")
    fresh = build(device)
    first = fresh[0]
    assert lowbit.load(fresh, file) == ["0", "2.0", "2.2"]
    assert fresh[0] is first and type(first) is QuantLinear
    assert first.spec.layout(33, 100) == model[0].spec.layout(33, 100)
    assert torch.equal(fresh(x), model(x))
    assert not any(tensor.is_meta for tensor in fresh.state_dict().values())
    assert first.bias.requires_grad and not first.weight.requires_grad
    assert lowbit.load(fresh, str(file)) == [] and torch.equal(fresh(x), model(x))
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(copy.deepcopy(fresh).state_dict(), model.state_dict())


def test_formats_may_differ_by_layer_and_some_stay_float(model, x):
    lowbit.quantize_(model, lowbit.int4_weight_only(32), lambda m, name: name == "0")
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight(), lambda m, name: name == "2.2")
    fresh = build()[:3]
    assert lowbit.load(fresh, model.state_dict()) == ["0", "2.2"]
    assert type(fresh[2][0]) is nn.Linear and torch.equal(fresh(x), model(x))


def test_a_float_state_dict_is_loaded_as_it_is(model, x):
    fresh = build("meta")[:3]
    assert lowbit.load(fresh, model.state_dict()) == [] and torch.equal(fresh(x), model(x))


@pytest.mark.parametrize("drop_second", [False, True], ids=["torch", "safetensors"])
def test_layers_that_shared_a_weight_share_it_again(drop_second, tied):
    model, x = tied(), torch.randn(2, 50)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    state = model.state_dict()
    if drop_second:
        del state["1.weight"]
    fresh = tied()
    lowbit.load(fresh, state)
    assert fresh[0].weight is fresh[1].weight and torch.equal(fresh(x), model(x))


def test_a_head_untied_from_its_embedding_by_quantizing_stays_untied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model, ids = Tied(), torch.tensor([1, 2])
    lowbit.quantize_(model, lowbit.int8_weight_only())
    fresh = Tied()
    lowbit.load(fresh, model.state_dict())
    assert type(fresh.head) is QuantLinear and torch.equal(fresh(ids), model(ids))
    state = model.state_dict()
    del state["head.weight"]
    with pytest.raises(
        ValueError, match=r"load: head.weight must be a packed weight of n=50 k=40 .*got float32 \[50, 40\]"
    ):
        lowbit.load(Tied(), state)


def from_another_layer(state: dict) -> None:
    state["0.weight"], state["0.layout"] = state["2.2.weight"], state["2.2.layout"]


WRONG = {
    "without layout": (lambda state: state.pop("0.layout"), r"0.weight must be a packed weight of n=33 k=100 with its layout, got uint8 .* without one"),
    "of another layer": (from_another_layer, "0.weight must be a packed weight of n=33 k=100 .*n=7 k=65"),
    "another version": (lambda state: state["0.layout"][0].add_(1), "0.weight must be .* layout version 3, known are 1 to 2"),
    "another layout": (lambda state: state["0.layout"][-1].add_(9), "0.weight must be .* layout 9, known are 0 x86-panel-16x64, 1 row-major"),
    "cut short": (lambda state: state.update({"0.weight": state["0.weight"][:1]}), r"0.weight must be .*got uint8 \[1, "),
    "a name is missing": (lambda state: state.pop("2.2.bias"), "names must be those of the model, missing 2.2.bias, unexpected none"),
    "an unknown name": (lambda state: state.update({"7.weight": torch.zeros(1)}), "names must be those of the model, missing none, unexpected 7.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_refused_and_the_model_stays_as_it_was(model, x, change, text):
    lowbit.quantize_(model, lowbit.int8_weight_only())
    state = model.state_dict()
    change(state)
    fresh = build()[:3]
    wanted, types = fresh(x), [type(module) for module in fresh.modules()]
    with pytest.raises(ValueError, match=f"load: {text}"):
        lowbit.load(fresh, state)
    assert [type(module) for module in fresh.modules()] == types and torch.equal(fresh(x), wanted)


def test_another_format_into_a_quantized_model_is_refused(model):
    lowbit.quantize_(model, lowbit.int8_weight_only())
    fresh = build()[:3]
    lowbit.quantize_(fresh, lowbit.int4_weight_only())
    with pytest.raises(ValueError, match="load: 0 is quantized as int4 g128, got int8 per-channel"):
        lowbit.load(fresh, model.state_dict())


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="load: there is no file"):
        lowbit.load(build(), tmp_path / "no.pt")
    with pytest.raises(FileNotFoundError, match="must hold one of model.safetensors.index.json"):
        lowbit.load(build(), tmp_path)


def test_a_buffer_that_no_file_holds_is_not_left_on_the_meta_device(model):
    def with_table() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8))
        model.register_buffer("table", torch.arange(3.0), persistent=False)
        return model

    model = with_table()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    with torch.device("meta"):
        fresh = with_table()
    with pytest.raises(
        ValueError, match="load: table would stay without values, no file holds them; build the model on the cpu"
    ):
        lowbit.load(fresh, model.state_dict())
    lowbit.load(with_table(), model.state_dict())


def test_an_encoder_layer_works_after_loading():
    def encoder() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(32, 4, 96, batch_first=True).eval()

    model, x = encoder(), torch.randn(2, 5, 32)
    lowbit.quantize_(model, lowbit.int8_weight_only())
    fresh = encoder()
    lowbit.load(fresh, model.state_dict())
    with torch.inference_mode():
        assert torch.equal(fresh(x), model(x))
