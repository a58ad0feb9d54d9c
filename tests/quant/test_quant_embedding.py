# SPDX-License-Identifier: Apache-2.0
"""QuantEmbedding: nn.Embedding's semantics, tied weights, state dicts, and the way back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import lowbit
from lowbit import QuantEmbedding

CONFIGS = [
    lowbit.int8_weight_only(),
    lowbit.int4_weight_only(32),
    lowbit.int4_weight_only(32, mapping_type=lowbit.MappingType.ASYMMETRIC),
    lowbit.intx_weight_only(torch.int3, 32),
    lowbit.nf4_weight_only(),
    lowbit.int8_dynamic_activation_int4_weight(32),
    lowbit.float_weight(torch.bfloat16),
]


def embeddings(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Embedding)


def all_layers(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Embedding, nn.Linear))


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_gives_the_rows_of_its_decoded_weight(config: object) -> None:
    model = nn.Sequential(nn.Embedding(50, 70, padding_idx=3))
    before, module = model[0].weight.detach().clone(), model[0]
    report = lowbit.quantize_(model, config, embeddings)
    assert model[0] is module and type(module) is QuantEmbedding and module.padding_idx == 3
    x = torch.randint(0, 50, (4, 5))
    table = module.dequantize()
    assert torch.equal(module(x), table[x]) and torch.equal(module(x.int()), table[x])
    assert not module(x).requires_grad and module(x[:0]).shape == (0, 5, 70)
    (row,) = report.rows
    assert (row.shape, row.bytes_after) == ((50, 70), module.weight.nbytes) and row.kernel.startswith("dequantize_rows_")
    db = 10 * torch.log10(before.square().sum() / (table - before).square().sum())
    assert float(db) == pytest.approx(row.error_db, abs=0.05) and db > 8
    with pytest.raises(IndexError, match=r"embedding: indices must be 0\.\.49, got another one at index 0 of \[1\]"):
        module(torch.tensor([50]))


def test_only_a_filter_asks_for_embeddings() -> None:
    model = Tied(tied=False)
    report = lowbit.quantize_(model, lowbit.int8_weight_only())
    assert type(model.embed) is nn.Embedding and [weight.name for weight in report.left] == ["embed.weight"]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tied_weights_stay_one(config: object) -> None:
    model = Tied()
    report = lowbit.quantize_(model, config, all_layers)
    assert model.head.weight is model.embed.weight and model.embed.layout_name != "row-major"
    notes = {row.layer: row.note for row in report.rows}
    assert notes["head"] == "shares the weight of embed" and report.rows[-1].bytes_after == 0
    assert torch.equal(model.embed.dequantize(), model.embed(torch.arange(50)))
    torch.testing.assert_close(model.embed.dequantize(), model.head.dequantize(), rtol=1e-6, atol=1e-7)
    x = torch.randint(0, 50, (3, 7))
    for layout in lowbit._C.LAYOUTS:
        state = lowbit.quant.repack(copy.deepcopy(model.state_dict()), layout)
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
        for device in ("cpu", "meta"):
            again = Tied().to(device)
            if device == "meta":
                again.head.weight = again.embed.weight
            lowbit.load(again, state)
            assert again.head.weight is again.embed.weight
            assert torch.equal(again(x), model(x))
        lowbit.load(again, state)  # into layers that are packed
        assert again.head.weight is again.embed.weight and torch.equal(again(x), model(x))
    lowbit.dequantize_(again)
    assert type(again.embed) is nn.Embedding and again.head.weight is again.embed.weight
    torch.testing.assert_close(again(x), model(x), rtol=0.2, atol=0.2)  # dynamic activations go


def test_a_tied_weight_of_which_one_layer_is_taken_is_untied() -> None:
    model = Tied()
    report = lowbit.quantize_(model, lowbit.int8_weight_only(), embeddings)
    assert type(model.head) is nn.Linear and report.rows[0].note == "untied from head.weight, which stays float"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("meta", [False, True])
def test_state_dicts_load(config: object, meta: bool, tmp_path) -> None:
    model = Tied(tied=False)
    lowbit.quantize_(model, config, all_layers)
    x = torch.randint(0, 50, (3, 7))
    for state in (model.state_dict(), lowbit.quant.repack(model.state_dict()),
                  lowbit.quant.repack(model.state_dict(), "x86-panel-16x64")):  # fmt: skip
        torch.save(state, tmp_path / "model.pt")
        with torch.device("meta" if meta else "cpu"):
            again = Tied(tied=False)
        assert set(lowbit.load(again, tmp_path / "model.pt")) == {"embed", "body", "head"}
        assert torch.equal(again(x), model(x))
        other = Tied(tied=False)
        lowbit.quantize_(other, config, all_layers)
        other.load_state_dict(state)
        assert torch.equal(other(x), model(x))


def test_a_state_dict_that_is_not_its_own_is_refused_whole() -> None:
    model, other = Tied(tied=False), Tied(tied=False)
    lowbit.quantize_(model, lowbit.int8_weight_only(), all_layers)
    lowbit.quantize_(other, lowbit.int4_weight_only(32), all_layers)
    kept = copy.deepcopy(model.state_dict())
    wanted = "load_state_dict: embed.weight must be packed as int8 per-channel of n=50 k=64, got int4 g32 of n=50 k=64"
    with pytest.raises(ValueError, match=wanted):
        model.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="embed.weight must be packed as int8 .* got float32"):
        model.load_state_dict(Tied(tied=False).state_dict(), strict=False)
    assert all(torch.equal(model.state_dict()[key], kept[key]) for key in kept)


def test_results_have_the_dtype_of_the_model() -> None:
    model = nn.Sequential(nn.Embedding(20, 32)).to(torch.bfloat16)
    lowbit.quantize_(model, lowbit.int8_weight_only(), embeddings)
    x = torch.tensor([1, 2])
    assert model(x).dtype == torch.bfloat16
    assert model.half()(x).dtype == torch.float16 and model.float()(x).dtype == torch.float32
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x)) and torch.equal(copy.deepcopy(model)(x), model(x))
    lowbit.dequantize_(model)
    assert type(model[0]) is nn.Embedding and model[0].weight.dtype == torch.float32
    assert list(model.state_dict()) == ["0.weight"]


def test_it_compiles() -> None:
    model = Tied(tied=False).eval()
    lowbit.quantize_(model, lowbit.int8_weight_only(), all_layers)
    x = torch.randint(0, 50, (3, 7))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


class Scaled(nn.Embedding):
    pass


@pytest.mark.parametrize(
    ("module", "config", "text"),
    [
        (nn.Embedding(9, 8, max_norm=1.0), lowbit.int8_weight_only(), "max_norm=1.0 changes its weight in every call"),
        (Scaled(9, 8), lowbit.int8_weight_only(), "Scaled is a subclass of nn.Embedding"),
        (nn.Embedding(0, 8), lowbit.int8_weight_only(), "its weight is empty"),
        (nn.Embedding(9, 8), lowbit.int4_weight_only(algorithm=lowbit.GPTQ()), "GPTQ needs inputs"),
    ],
)
def test_what_cannot_be_an_embedding_is_refused(module: nn.Module, config: object, text: str) -> None:
    with pytest.raises(ValueError, match=f"quantize_: .*{text}"):
        lowbit.quantize_(nn.Sequential(module), config, embeddings)
    assert type(module) is not QuantEmbedding


def test_a_quantized_embedding_is_not_quantized_again() -> None:
    model = nn.Sequential(nn.Embedding(9, 8))
    lowbit.quantize_(model, lowbit.int8_weight_only(), embeddings)
    with pytest.raises(ValueError, match="0 is already quantized as int8 per-channel"):
        lowbit.quantize_(model, lowbit.int8_weight_only(), embeddings)
