# SPDX-License-Identifier: Apache-2.0
"""Prepared layers in models: embeddings, tied weights, Conv1D, adapters, state dicts, copies, autocast, graphs,
checkpointing, resuming."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit.ops.fake_quantize import fake_quantize_activations
from lowbit.training import FakeQuantizedEmbedding, FakeQuantizedLinear, QATConfig

INT4 = lowbit.int8_dynamic_activation_int4_weight(32)
INT3 = lowbit.intx_weight_only(torch.int3, 32, mapping_type=lowbit.MappingType.ASYMMETRIC)
Make = Callable[..., nn.Module]


def is_embedding(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Embedding)


@pytest.mark.parametrize("learned_scales", [False, True])
@pytest.mark.parametrize("config", [INT4, INT3, lowbit.nf4_weight_only(64), lowbit.float8_weight_only()], ids=str)
def test_an_embedding_is_trained_and_converted_to_the_rows_that_it_gave(config: Any, learned_scales: bool) -> None:
    table = nn.Sequential(nn.Embedding(50, 100, padding_idx=3))
    lowbit.quantize_(table, QATConfig(config, learned_scales=learned_scales), is_embedding)
    assert type(table[0]) is FakeQuantizedEmbedding
    tokens = torch.tensor([[1, 3, 7], [7, 0, 49]])
    for _ in range(3):
        rows = table(tokens)
        rows.square().sum().backward()
        with torch.no_grad():
            for parameter in table.parameters():
                parameter -= 0.05 * parameter.grad
    grad = table[0].weight.grad
    assert grad[[1, 7, 0, 49]].count_nonzero() > 300 and not grad[[3, 2, 30]].any()  # none of padding and unseen rows
    rows, weight = table(tokens).detach(), table[0].fake_quantized_weight().detach()
    assert torch.equal(rows, weight[tokens]) and table(tokens[:0]).shape == (0, 3, 100)
    lowbit.quantize_(table, QATConfig(config, step="convert"))
    assert type(table[0]) is lowbit.QuantEmbedding
    assert torch.equal(table(tokens), rows) and torch.equal(table[0].dequantize(), weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(60, 96), nn.Linear(96, 60, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("learned_scales", [False, True])
def test_a_tied_weight_stays_one_through_training_and_converting(learned_scales: bool) -> None:
    """The head and its table have 8 bits, as quantize_ gives them."""
    model = Tied()
    lowbit.quantize_(model, QATConfig(lowbit.int8_dynamic_activation_int4_weight(32), learned_scales=learned_scales))
    assert model.head.weight is model.table.weight and model.head.weight_scale is model.table.weight_scale
    assert len(list(model.parameters())) == 1 + learned_scales
    tokens = torch.arange(24).view(2, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    rows = model.table(tokens).detach()
    lowbit.quantize_(model, QATConfig(lowbit.int8_dynamic_activation_int4_weight(32), step="convert"))
    assert model.head.weight is model.table.weight and model.head.spec.format == "int8"
    assert torch.equal(model.table(tokens), rows) and torch.equal(model.head.dequantize()[tokens], rows)


def test_a_conv1d_of_transformers_is_trained() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(48, 100))
    lowbit.quantize_(model, QATConfig(INT4))
    x = torch.randn(5, 100)
    model(x).square().sum().backward()
    assert model[0].weight.grad.shape == (100, 48) and model[0].weight.grad.any()
    weight = model[0].fake_quantized_weight().detach()
    back = copy.deepcopy(model)
    lowbit.quantize_(back, QATConfig(step="convert"))
    assert type(back[0]) is conv1d and torch.equal(back[0].weight, model[0].weight)
    lowbit.quantize_(model, QATConfig(INT4, step="convert"))
    assert torch.equal(model[0].dequantize(), weight)


def test_adapters_of_peft_are_trained_around_the_prepared_layer_and_stay(
    model: nn.Module, train: Callable[..., Any]
) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights="gaussian"))
    lowbit.quantize_(lora, QATConfig(INT4), lambda module, name: isinstance(module, nn.Linear) and "lora" not in name)
    base = lora.base_model.model[0].get_base_layer()
    assert type(base) is FakeQuantizedLinear and not base.weight.requires_grad
    weight = base.weight.detach().clone()
    train(lora)
    assert torch.equal(base.weight, weight) and lora.base_model.model[0].lora_B["default"].weight.any()
    x, rounded = torch.randn(7, 100), base.fake_quantized_weight().detach()
    y = lora(x).detach()
    lowbit.quantize_(lora, QATConfig(INT4, step="convert"))
    base = lora.base_model.model[0].get_base_layer()
    assert type(base) is lowbit.QuantLinear and torch.equal(base.dequantize(), rounded)
    assert type(lora.base_model.model[0]).__name__ == "QuantLoraLinear"
    torch.testing.assert_close(lora(x), y)


def test_adapters_that_come_after_preparing_are_trained_too(prepared: Make, train: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.get_peft_model(prepared(INT4), peft.LoraConfig(r=4, target_modules=["0"]))
    losses = train(lora, 6)
    assert losses[-1] != losses[0] and type(lora.base_model.model[0].get_base_layer()) is FakeQuantizedLinear


@pytest.mark.parametrize("learned_scales", [False, True])
def test_a_state_dict_goes_round_and_that_of_the_float_model_fits(
    model: nn.Module, prepared: Make, train: Callable[..., Any], learned_scales: bool
) -> None:
    first, second = (prepared(INT3, learned_scales=learned_scales) for _ in range(2))
    train(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(4, 100)
    assert torch.equal(first(x), second(x))
    if not learned_scales:
        assert first.state_dict().keys() == model.state_dict().keys()
        second.load_state_dict(model.state_dict())
        assert torch.equal(second(x), prepared(INT3)(x))


@pytest.mark.parametrize("shape", ((100,), (0, 100), (2, 3, 100)), ids=str)
def test_x_of_any_rank_gives_the_gradients_of_its_rows(prepared: Make, shape: tuple[int, ...]) -> None:
    layers, x = [prepared(INT3)[0] for _ in range(2)], torch.randn(shape)
    layers[0](x).square().sum().backward()
    layers[1](x.reshape(-1, 100)).square().sum().backward()
    assert layers[0](x).shape == (*shape[:-1], 33)
    for one, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_copies_are_on_their_own(prepared: Make, train: Callable[..., Any]) -> None:
    model = prepared(INT3, learned_scales=True)
    copied, x = copy.deepcopy(model), torch.randn(4, 100)
    y = model(x)
    train(model)
    assert torch.equal(copied(x), y) and not torch.equal(model(x), y)
    lowbit.quantize_(copied, QATConfig(INT3, step="convert"))
    assert type(model[0]) is FakeQuantizedLinear
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


@pytest.mark.parametrize("learned_scales", [False, True])
def test_a_resumed_training_is_the_uninterrupted_one(
    prepared: Make, train: Callable[..., Any], learned_scales: bool
) -> None:
    models = [prepared(INT4, learned_scales=learned_scales) for _ in range(3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in models]
    whole = train(models[0], 6, optimizers[0])
    begun = train(models[1], 3, optimizers[1])
    models[2].load_state_dict(models[1].state_dict())
    optimizers[2].load_state_dict(optimizers[1].state_dict())
    assert torch.equal(torch.stack(begun + train(models[2], 3, optimizers[2], first=3)), torch.stack(whole))
    assert all(map(torch.equal, models[0].parameters(), models[2].parameters()))


def test_in_autocast_activations_are_rounded_in_its_dtype(prepared: Make) -> None:
    """As the op linear casts x first."""
    layer = prepared(INT4)[0]
    x = torch.randn(6, 100)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    half, weight = x.bfloat16(), layer.fake_quantized_weight().bfloat16()
    rounded = fake_quantize_activations(half, layer.x_format, 32)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, nn.functional.linear(rounded, weight, layer.bias.bfloat16()))
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.any()


@pytest.mark.parametrize("config", [INT4, INT3], ids=str)
@pytest.mark.parametrize("learned_scales", [False, True])
def test_it_compiles_without_a_graph_break(prepared: Make, config: Any, learned_scales: bool) -> None:
    models = [prepared(config, learned_scales=learned_scales) for _ in range(2)]
    compiled = torch.compile(models[1], backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 100)
    for run in (models[0], compiled):
        run(x).square().sum().backward()
    for eager, graph in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(graph.grad, eager.grad)


def test_an_embedding_compiles_without_a_graph_break() -> None:
    tables = [nn.Sequential(nn.Embedding(20, 64)) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    tokens = torch.tensor([[1, 5], [5, 19]])
    for table in tables:
        lowbit.quantize_(table, QATConfig(INT4), is_embedding)
    tables[0](tokens).square().sum().backward()
    torch.compile(tables[1], backend="aot_eager", fullgraph=True)(tokens).square().sum().backward()
    assert torch.equal(tables[0][0].weight.grad, tables[1][0].weight.grad)


def test_gradient_checkpointing_changes_nothing(prepared: Make) -> None:
    models, x = [prepared(INT4) for _ in range(2)], torch.randn(5, 100)
    models[0](x).square().sum().backward()
    checkpoint(models[1], x, use_reentrant=False).square().sum().backward()
    for plain, again in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain.grad, again.grad)


def test_the_fused_float_path_of_torchs_encoder_is_off() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    report = lowbit.quantize_(layer, QATConfig(lowbit.intx_weight_only(torch.int2, 32)))
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        fused = layer(x)
    torch.testing.assert_close(fused, layer(x))
    assert any("inference path was turned off" in note for note in report.notes)
