# SPDX-License-Identifier: Apache-2.0
"""fuse_gated_mlps: which modules it takes, and that they compute the same."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import gated_mlp
import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.quant.gated_mlp import FusedGatedMLP


class GatedMLP(gated_mlp.GatedMLP):
    def __init__(self, act_fn: nn.Module, bias: bool = False) -> None:
        super().__init__(96, 160, act_fn, bias)


class AnotherFormula(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


CONFIGS = {
    "int8": lowbit.int8_weight_only(),
    "int4": lowbit.int4_weight_only(group_size=32),
    "w8a8": lowbit.int8_dynamic_activation_int8_weight(),
    "w4a8": lowbit.int8_dynamic_activation_int4_weight(group_size=32),
}
ACTIVATIONS = [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU(), nn.Identity()]


def quantized(module: nn.Module, config: object = CONFIGS["int8"]) -> nn.Module:
    model = nn.ModuleDict({"mlp": module}).eval()
    lowbit.quantize_(model, config)
    return model


@pytest.mark.parametrize("act_fn", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_same_result(act_fn: nn.Module, bias: bool) -> None:
    model = quantized(GatedMLP(act_fn, bias))
    x = torch.randn(7, 96)
    wanted = model["mlp"](x)
    assert lowbit.fuse_gated_mlps(model) == ["mlp"]
    torch.testing.assert_close(model["mlp"](x), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_format(config: object, dtype: torch.dtype) -> None:
    model = quantized(GatedMLP(nn.SiLU()), config)
    x = torch.randn(2, 5, 96, dtype=dtype)
    wanted = model["mlp"](x).float()
    assert lowbit.fuse_gated_mlps(model) == ["mlp"]
    got = model["mlp"](x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), wanted, rtol=0, atol=2e-2 * wanted.abs().max().item())


def test_names_state_and_copies_stay() -> None:
    model = quantized(GatedMLP(nn.SiLU()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lowbit.fuse_gated_mlps(model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    x = torch.randn(3, 96)
    for other in (copy.deepcopy(model), torch.load(_saved(model), weights_only=False)):
        assert isinstance(other["mlp"], FusedGatedMLP)
        assert torch.equal(other["mlp"](x), model["mlp"](x))
    assert lowbit.fuse_gated_mlps(model) == []  # nothing is left to fuse


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_input_gradient() -> None:
    model = quantized(GatedMLP(nn.SiLU()))
    x = torch.randn(3, 96, requires_grad=True)
    (wanted,) = torch.autograd.grad(model["mlp"](x).square().sum(), x)
    lowbit.fuse_gated_mlps(model)
    (got,) = torch.autograd.grad(model["mlp"](x).square().sum(), x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_compiles_whole() -> None:
    model = quantized(GatedMLP(nn.SiLU()))
    lowbit.fuse_gated_mlps(model)
    x = torch.randn(3, 96)
    compiled = torch.compile(model["mlp"], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model["mlp"](x))


def test_others_are_left_alone(subtests: pytest.Subtests) -> None:
    extra = GatedMLP(nn.SiLU())
    extra.norm = nn.LayerNorm(96)
    models = {
        "gate_proj is Linear, no QuantLinear": nn.ModuleDict({"mlp": GatedMLP(nn.SiLU())}),
        "its results are not those of down_proj": quantized(AnotherFormula(nn.SiLU())),
        "its act_fn is none of relu, gelu": quantized(GatedMLP(nn.Tanh())),
        "it has more than three linear layers and an activation: norm": quantized(extra),
        "": nn.Sequential(nn.Linear(4, 4)),
    }
    for what, model in models.items():
        with subtests.test(what):
            kinds = [type(module) for module in model.modules()]
            fused = lowbit.fuse_gated_mlps(model)
            assert fused == [] and len(fused.left) == bool(what) and what in "".join(fused.left.values()), fused
            assert [type(module) for module in model.modules()] == kinds, what


SEEN: list[str] = []


def forward_replaced(layer: nn.Module) -> Callable[[], None]:
    """As accelerate's add_hook_to_module does it."""
    before = layer.forward
    layer.forward = lambda *inputs: (SEEN.append("seen"), before(*inputs))[1]
    return lambda: delattr(layer, "forward")


def seen(*_: object) -> None:
    SEEN.append("seen")


HOOKS: dict[str, Callable[[nn.Module], Callable[[], None]]] = {
    "forward": lambda layer: layer.register_forward_hook(seen).remove,
    "forward, with keywords": lambda layer: layer.register_forward_hook(lambda *_: seen(), with_kwargs=True).remove,
    "forward, always": lambda layer: layer.register_forward_hook(seen, always_call=True).remove,
    "before forward": lambda layer: layer.register_forward_pre_hook(seen).remove,
    "backward": lambda layer: layer.register_full_backward_hook(seen).remove,
    "before backward": lambda layer: layer.register_full_backward_pre_hook(seen).remove,
    "instead of forward": forward_replaced,
    "of all modules": lambda layer: nn.modules.module.register_module_forward_hook(lambda module, *_: SEEN.append("seen") if module is layer else None).remove,
}  # fmt: skip


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj", "act_fn", "down_proj"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_see_their_calls(hook: Callable[[nn.Module], Callable[[], None]], layer: str) -> None:
    model = quantized(GatedMLP(nn.SiLU()))
    x = torch.randn(3, 96, requires_grad=True)

    def calls() -> int:
        SEEN.clear()
        model["mlp"](x).sum().backward()
        return len(SEEN)

    remove = hook(getattr(model["mlp"], layer))
    report = lowbit.fuse_gated_mlps(model)
    assert calls() == 1
    called = layer == "down_proj" and hook is not HOOKS["of all modules"]  # by a fused one too
    assert list(report) == (["mlp"] if called else [])
    where = "all modules" if hook is HOOKS["of all modules"] else layer
    assert report.left == ({} if called else {"mlp": f"hooks on {where}"})
    assert called or repr(report) == f"no layer\nleft: mlp: hooks on {where}"
    remove()
    assert called or lowbit.fuse_gated_mlps(model) == ["mlp"]
    assert calls() == 0
    remove = hook(getattr(model["mlp"], layer))  # a hook that comes later
    assert calls() == 1
    remove()
    assert calls() == 0


def test_meta_is_refused() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"mlp": GatedMLP(nn.SiLU())})
    lowbit.quantize_(model, CONFIGS["int8"])
    with pytest.raises(ValueError, match="mlp must have its weights in memory"):
        lowbit.fuse_gated_mlps(model)


def test_a_real_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    lowbit.quantize_(model, CONFIGS["int8"])
    ids = torch.randint(0, 97, (1, 12))
    with torch.no_grad():
        wanted = model(ids).logits
        assert lowbit.fuse_gated_mlps(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "other",
    [nn.ReLU(), nn.GELU(), nn.Identity(), nn.Tanh(), torch.tanh, nn.functional.relu],
    ids=lambda other: getattr(other, "__name__", str(other)),  # str of a function has its address
)
@pytest.mark.parametrize("first", [nn.SiLU(), nn.functional.silu], ids=["module", "function"])
def test_an_activation_that_comes_later_counts(first: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> None:
    model, plain = (quantized(GatedMLP(nn.SiLU())) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for module in (model["mlp"], plain["mlp"]):
        del module.act_fn
        module.act_fn = first
    assert lowbit.fuse_gated_mlps(model) == ["mlp"]
    x = torch.randn(3, 96)
    for act_fn in (first, other, first):
        for module in (model["mlp"], plain["mlp"]):
            module._modules.pop("act_fn", None), module.__dict__.pop("act_fn", None)
            module.act_fn = act_fn
        for _ in range(2):
            torch.testing.assert_close(model["mlp"](x), plain["mlp"](x), rtol=1e-5, atol=1e-6)


def test_an_activation_that_changes_by_itself_counts() -> None:
    model = quantized(GatedMLP(nn.GELU()))
    lowbit.fuse_gated_mlps(model)
    x = torch.randn(3, 96) * 3
    before = model["mlp"](x)
    model["mlp"].act_fn.approximate = "tanh"
    other = quantized(GatedMLP(nn.GELU(approximate="tanh")))
    other.load_state_dict(model.state_dict())
    assert not torch.equal(model["mlp"](x), before)
    torch.testing.assert_close(model["mlp"](x), other["mlp"](x), rtol=1e-5, atol=1e-6)


def test_an_activation_with_parameters_is_left() -> None:
    act_fn = nn.PReLU(init=0.0)  # relu, today
    assert lowbit.fuse_gated_mlps(quantized(GatedMLP(act_fn))) == []


class WithDropout(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, training=self.training)


@pytest.mark.parametrize("training", [False, True], ids=["fused in eval", "fused in training"])
def test_dropout_of_the_module_is_that_of_its_training(training: bool) -> None:
    model = quantized(WithDropout(nn.SiLU())).train(training)
    x = torch.randn(3, 96)
    wanted = model.eval()["mlp"](x)
    assert lowbit.fuse_gated_mlps(model.train(training)) == ["mlp"]
    for _ in range(2):
        assert (model.train()["mlp"](x) == 0).any()
        torch.testing.assert_close(model.eval()["mlp"](x), wanted, rtol=1e-5, atol=1e-6)


def test_another_activation_counts_in_a_compiled_module() -> None:
    model = quantized(GatedMLP(nn.SiLU()))
    lowbit.fuse_gated_mlps(model)
    x = torch.randn(3, 96)
    compiled = torch.compile(model["mlp"], fullgraph=True, backend="aot_eager")
    before = compiled(x)
    model["mlp"].act_fn = nn.ReLU()
    assert torch.equal(compiled(x), model["mlp"](x)) and not torch.equal(compiled(x), before)


def test_an_adapter_is_named_as_the_reason() -> None:
    from lowbit.quant.fused import not_packed

    adapter = nn.Linear(2, 2)
    adapter.get_base_layer = lambda: adapter
    assert not_packed("q_proj", adapter).startswith("q_proj has an adapter of peft") and "merge it" in not_packed("q_proj", adapter)
    assert not_packed("q_proj", nn.Linear(2, 2)) == "q_proj is Linear, no QuantLinear"
