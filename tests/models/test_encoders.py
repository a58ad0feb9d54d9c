# SPDX-License-Identifier: Apache-2.0
"""Encoders in one call: which layers are, that padding is not computed, and what makes them run their own code."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit

transformers = pytest.importorskip("transformers")

from lowbit.models import encoder_batches  # noqa: E402
from lowbit.ops.run_program import KeptProgram  # noqa: E402
from lowbit.quant.fused import unfuse  # noqa: E402

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
WINDOW = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "XLMRoberta": {"pad_token_id": 1},
    "Roberta": {"hidden_act": "relu"},
    "Electra": {"embedding_size": 64},
    "ModernBert": WINDOW,
    "ModernBert biased": WINDOW
    | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "gelu_pytorch_tanh"},
}
CONFIGS = {
    "int8": lowbit.int8_weight_only(),
    "w8a8": lowbit.int8_dynamic_activation_int8_weight(group_size=32),
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
}
LENGTHS = (21, 5, 1, 13)


def made(name: str, config: str = "int8", attention: str = "lowbit", **more: Any) -> nn.Module:
    kind = name.split()[0]
    settings = getattr(transformers, f"{kind}Config")(**SIZES | MODELS[name] | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")._from_config(settings, attn_implementation=attention).eval()
    for parameter in model.parameters():  # norms are made of ones, biases of zeros
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    lowbit.quantize_(model, CONFIGS[config])
    return model


def batch(lengths: tuple[int, ...] = LENGTHS, left: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(3))
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": (real.flip(1) if left else real).long()}


@torch.no_grad()
def hidden(model: nn.Module, given: dict[str, Tensor], **more: Any) -> Tensor:
    return model(**given, **more).last_hidden_state


def assert_alike(got: Tensor, wanted: Tensor, given: dict[str, Tensor], bound: float = 1e-4) -> None:
    real = given["attention_mask"].bool()
    assert float((got - wanted)[real].norm() / wanted[real].norm()) < bound


@contextlib.contextmanager
def inputs_of_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Tensor]]]:
    """The inputs of each call of the op."""
    calls: list[list[Tensor]] = []
    run = KeptProgram.__call__

    def counted(self: KeptProgram, states: Any, inputs: Any, starts: Any) -> Tensor:
        calls.append(inputs)
        return run(self, states, inputs, starts)

    with monkeypatch.context() as patch:
        patch.setattr(KeptProgram, "__call__", counted)
        yield calls


@pytest.mark.parametrize("name", MODELS)
def test_all_layers_are_one_call_of_the_real_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = made(name), batch()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    report = lowbit.fuse(model)
    assert ("(model)" if "Modern" in name else "encoder") in report
    with inputs_of_calls(monkeypatch) as calls:
        got = hidden(model, given)
    assert [call[0].shape for call in calls] == [(1, sum(LENGTHS), 64)]
    assert_alike(got, hidden(eager, given), given)


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
@pytest.mark.parametrize("config", ["w8a8", "w4a8"])
def test_int8_activations(name: str, config: str) -> None:
    model, given = made(name, config), batch()
    wanted = hidden(model, given)
    lowbit.fuse(model)
    assert_alike(hidden(model, given), wanted, given, 2e-2)  # a rounded activation may be the next code


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = made(name).to(dtype), batch()
    wanted = hidden(model, given)
    lowbit.fuse(model)
    with inputs_of_calls(monkeypatch) as calls:
        got = hidden(model, given)
    assert len(calls) == 1 and got.dtype == dtype
    assert_alike(got.float(), wanted.float(), given, 3e-2)


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_padding_is_zero_behind_the_layers(name: str) -> None:
    model, given = made(name), batch()
    lowbit.fuse(model)
    got = hidden(model, given)[~given["attention_mask"].bool()]
    if name == "Bert":
        assert not got.any()
    else:
        torch.testing.assert_close(got, hidden_of_zeros(model).expand_as(got))


@torch.no_grad()
def hidden_of_zeros(model: nn.Module) -> Tensor:
    return model.final_norm(torch.zeros(1, 64))


def test_batches_without_padding_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Bert", "ModernBert"):
        model, given = made(name), batch((20, 20))
        wanted = hidden(model, given)
        lowbit.fuse(model)
        with inputs_of_calls(monkeypatch) as calls:
            assert_alike(hidden(model, given), wanted, given)
            assert_alike(hidden(model, {"input_ids": given["input_ids"]}), wanted, given)
        assert [call[0].shape for call in calls] == [(2, 20, 64)] * 2


def test_padding_on_the_left_and_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tokens are packed wherever they are; of a window, where none is missing in between."""
    holes = batch((20, 20))
    holes["attention_mask"][:, 4:7] = 0
    for name, given, count in (
        ("Bert", batch(left=True), sum(LENGTHS)), ("ModernBert", batch(left=True), sum(LENGTHS)),
        ("Bert", holes, 34), ("ModernBert", holes, 40),
    ):  # fmt: skip
        model = made(name)
        wanted = hidden(model, given)
        lowbit.fuse(model)
        with inputs_of_calls(monkeypatch) as calls:
            assert_alike(hidden(model, given), wanted, given)
        assert [call[0].shape[:2].numel() for call in calls] == [count]


def test_a_mask_of_another_form_runs_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = made("Bert"), batch((12, 12))
    given["attention_mask"] = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    wanted = hidden(model, given)
    lowbit.fuse(model)
    with inputs_of_calls(monkeypatch) as calls:
        got = hidden(model, given)
    assert [call[0].shape for call in calls] == [(2, 12, 64)]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_token_types_and_positions() -> None:
    model, given = made("Bert"), batch()
    more = {"token_type_ids": (given["input_ids"] > 40).long(), "position_ids": torch.arange(21).flip(0)[None] + 3}
    wanted = hidden(model, given, **more)
    lowbit.fuse(model)
    assert_alike(hidden(model, given, **more), wanted, given)


def test_heads_of_tasks_and_pooling() -> None:
    settings = transformers.BertConfig(**SIZES, num_labels=3)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification._from_config(settings, attn_implementation="lowbit").eval()
    lowbit.quantize_(model, lowbit.int8_weight_only())
    given = batch()
    with torch.no_grad():
        wanted = model(**given).logits
        assert "bert.encoder" in lowbit.fuse(model)
        torch.testing.assert_close(model(**given).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_its_own_code_runs_for_more_than_inference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = made(name), batch()
    wanted = hidden(model, given)
    lowbit.fuse(model)
    with inputs_of_calls(monkeypatch) as calls:
        got = model(**given).last_hidden_state  # with gradients
        assert got.requires_grad and not calls
        assert_alike(got.detach(), wanted, given)
        model.set_attn_implementation("sdpa")
        assert_alike(hidden(model, given), wanted, given)
        assert not calls
        model.set_attn_implementation("lowbit")
        states = model(**given, output_hidden_states=True).hidden_states
        assert len(states) == 4 and not calls
        model.train()
        with torch.no_grad():
            model(**given)
        assert not calls


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_changes_take_effect_in_the_next_call(name: str) -> None:
    given = batch()
    for change in CHANGES:
        model, other = made(name), made(name)
        lowbit.fuse(model)
        before = hidden(model, given)
        change(model), change(other)
        wanted = hidden(other, given)
        assert_alike(hidden(model, given), wanted, given)
        assert float((before - wanted).norm()) > 1e-3, change.__name__


def layer_of(model: nn.Module) -> nn.Module:
    return model.layers[1] if hasattr(model, "layers") else model.encoder.layer[1]


def other_eps(model: nn.Module) -> None:
    next(module for module in layer_of(model).modules() if isinstance(module, nn.LayerNorm)).eps = 5.0


def other_activation(model: nn.Module) -> None:
    for module in layer_of(model).modules():
        for name in ("act", "intermediate_act_fn"):
            if name in module._modules:
                setattr(module, name, nn.ReLU())


def other_weights(model: nn.Module) -> None:
    linears = [module for module in layer_of(model).modules() if isinstance(module, lowbit.QuantLinear)]
    linears[-1].weight.data.copy_(linears[-1].weight.data.flip(0))


def hook_on_an_output(model: nn.Module) -> None:
    linears = [module for module in layer_of(model).modules() if isinstance(module, lowbit.QuantLinear)]
    linears[-1].register_forward_hook(lambda module, given, y: 2 * y)


def hook_on_a_container(model: nn.Module) -> None:
    layer = layer_of(model)
    part = layer.intermediate if hasattr(layer, "intermediate") else layer.mlp
    part.register_forward_hook(lambda module, given, y: 2 * y)


def fewer_layers(model: nn.Module) -> None:
    model.config.num_hidden_layers = 2
    stack = model if hasattr(model, "layers") else model.encoder
    name = "layers" if hasattr(model, "layers") else "layer"
    setattr(stack, name, getattr(stack, name)[:2])


CHANGES = (other_eps, other_activation, other_weights, hook_on_an_output, hook_on_a_container, fewer_layers)


def test_unfuse_and_dequantize() -> None:
    for name in ("Bert", "ModernBert"):
        model, given = made(name), batch()
        wanted, classes = hidden(model, given), [type(module) for module in model.modules()]
        names = list(model.state_dict())
        lowbit.fuse(model)
        assert list(model.state_dict()) == names
        hidden(model, given)
        unfuse(model)
        assert [type(module) for module in model.modules()] == classes
        assert_alike(hidden(model, given), wanted, given)
        lowbit.fuse(model)
        lowbit.dequantize_(model)
        assert_alike(hidden(model, given), wanted, given)


def test_copies_and_saved_models(tmp_path: Any) -> None:
    model, given = made("Bert"), batch()
    lowbit.fuse(model)
    wanted = hidden(model, given)
    assert_alike(hidden(copy.deepcopy(model), given), wanted, given)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="lowbit").eval()
    assert_alike(hidden(loaded, given), wanted, given)


def test_layers_that_stay_say_why() -> None:
    model = made("Bert")
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.register_forward_hook(lambda *_: None)
    settings = transformers.BertConfig(**SIZES)
    plain = transformers.BertModel._from_config(settings).eval()
    assert "its query is Linear, no QuantLinear" in lowbit.fuse(plain).left.values()
    left = lowbit.fuse(model).left
    assert left["encoder.layer.0"] == "hooks on output.LayerNorm"
    causal = made("Bert", is_decoder=True)
    assert "encoder" not in lowbit.fuse(causal)
    chunked = made("Bert", chunk_size_feed_forward=2)
    assert lowbit.fuse(chunked).left["encoder.layer.0"] == "it does not join its pieces as an encoder layer does"


def test_packed_batches() -> None:
    missing = encoder_batches.MISSING
    x, real = torch.randn(2, 4, 3), torch.tensor([[True, True, True, False], [True, False, False, False]])
    mask = real[:, None, None].expand(2, 1, 4, 4)
    packed = encoder_batches.packed_batch([x, missing, missing, mask], [None])
    assert packed is not None and packed.inputs[-1].tolist() == [0, 3, 4]
    torch.testing.assert_close(packed.inputs[0], torch.cat([x[0, :3], x[1, :1]])[None])
    whole = packed.padded(packed.inputs[0])
    torch.testing.assert_close(whole[real], x[real])
    assert not whole[~real].any()
    others = mask.float(), torch.ones_like(mask), mask & torch.eye(4, dtype=torch.bool), torch.zeros_like(mask)
    for other in (missing, *others):
        assert encoder_batches.packed_batch([x, missing, missing, other], [None]) is None
