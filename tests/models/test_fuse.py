# SPDX-License-Identifier: Apache-2.0
"""lowbit.fuse: what it takes of each architecture, and that the model still says the same in every way it is used."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoders import CONFIGS, MODELS, SIZES, answer, attentions, calls_of_layers, logits, made, prompt, transformers
from torch import Tensor, nn

import lowbit
from lowbit.quant.fused import Fused, unfuse
from lowbit.quant.fused_norm import norm_facts


def test_of_gpt2_norms_and_mlps_fit() -> None:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=96, bos_token_id=1, eos_token_id=2, attn_implementation="lowbit"
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight())
    wanted = logits(model, prompt())
    assert {name.rpartition(".")[2] for name in lowbit.fuse(model)} == {"ln_1", "ln_2", "ln_f", "mlp"}
    torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)


def test_a_float_model_says_which_layers_are_not_packed() -> None:
    model = made("llama")
    lowbit.dequantize_(model)
    assert "left: model.layers.0.mlp, model.layers.1.mlp: gate_proj is Linear, no QuantLinear" in repr(lowbit.fuse(model))


class Table(nn.Module):
    """A module without an input."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4, 64))

    def forward(self) -> Tensor:
        return self.rows


def test_modules_without_an_input_or_a_forward_are_passed_over() -> None:
    model = made("llama")
    model.model.layers[0].table, model.model.layers[0].none = Table(), nn.ModuleDict({"table": Table()})
    model.model.layers[0].none.forward = None
    assert any("self_attn" in name for name in lowbit.fuse(model))


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_prompts_and_of_steps_stay(name: str) -> None:
    model = made(name)
    wanted, said = logits(model, prompt()), answer(model, prompt())
    report = lowbit.fuse(model)
    assert all(attn.__class__.__name__.startswith("Fused") for attn in attentions(model))
    assert any("norm" in fused for fused in report)
    torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(answer(model, prompt()), said)
    assert lowbit.fuse(model) == []  # all that can be is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_int8_activations_and_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model = made(name, "w4a8").to(dtype)
    wanted = logits(model, prompt()).float()
    assert lowbit.fuse(model)
    error = (logits(model, prompt()).float() - wanted).abs().max() / wanted.abs().max()
    assert error < (0.02 if dtype is torch.float32 else 0.1)  # where a value is rounded to its neighbour


USES: dict[str, Callable[[nn.Module], Tensor]] = {
    "left padding": lambda model: answer(model, prompt(), attention_mask=torch.tensor([[0] * 4 + [1] * 5, [1] * 9])),
    "beams": lambda model: answer(model, prompt(), num_beams=3),
    "sampling": lambda model: (torch.manual_seed(1), answer(model, prompt(), do_sample=True))[1],
    "static cache": lambda model: answer(model, prompt(), cache_implementation="static", disable_compile=True),
    "no cache": lambda model: answer(model, prompt(), use_cache=False),
    "prompt lookup": lambda model: answer(model, prompt(1), prompt_lookup_num_tokens=3),
    "chunked prompt": lambda model: answer(model, prompt(1, 20), prefill_chunk_size=7),
    "a long answer": lambda model: answer(model, prompt(1, 4), max_new_tokens=60),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_use_says_the_same(name: str, use: str) -> None:
    model = made(name)
    wanted = USES[use](model)
    lowbit.fuse(model)
    assert torch.equal(USES[use](model), wanted)


def test_quantized_cache_and_other_attention() -> None:
    from lowbit.models.quantized_cache import QuantizedCache

    model = made("llama")
    wanted = answer(model, prompt(), past_key_values=QuantizedCache("int8"))
    lowbit.fuse(model)
    assert torch.equal(answer(model, prompt(), past_key_values=QuantizedCache("int8")), wanted)
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        torch.testing.assert_close(logits(model, prompt()), logits(made("llama", attention=attention), prompt()))


def test_gradients_and_training_are_those_of_the_unfused_model() -> None:
    grads = []
    for fused in (False, True):
        model = made("llama").train()
        if fused:
            lowbit.fuse(model)
        model(prompt(), labels=prompt()).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and grads[0]
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


def test_a_hook_sees_the_projection_that_it_waits_for() -> None:
    model = made("llama")
    lowbit.fuse(model)
    wanted, seen = logits(model, prompt()), []
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)
    assert seen == [1]
    handle.remove()
    logits(model, prompt())
    assert seen == [1]


def test_outputs_that_transformers_records() -> None:
    model = made("llama", attention="sdpa")
    with torch.no_grad():
        wanted = model(prompt(), output_hidden_states=True).hidden_states
        lowbit.fuse(model)
        got = model(prompt(), output_hidden_states=True).hidden_states
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_an_adapter_added_later_counts() -> None:
    peft = pytest.importorskip("peft")
    model = made("llama")
    lowbit.fuse(model)
    before = logits(model, prompt())
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    with_adapter = logits(adapted, prompt())
    assert not torch.allclose(with_adapter, before, rtol=1e-3)
    unfuse(model)
    torch.testing.assert_close(logits(adapted, prompt()), with_adapter, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_fused_and_their_own(how: str) -> None:
    model = made("qwen2")
    lowbit.fuse(model)
    wanted = logits(model, prompt())
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        import pickle

        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(logits(twin, prompt()), wanted)
    for module in twin.modules():
        if isinstance(module, lowbit.QuantLinear):
            module.weight.data.zero_()
    assert all(isinstance(attn, Fused) for attn in attentions(twin))
    assert torch.equal(logits(model, prompt()), wanted) and not torch.equal(logits(twin, prompt()), wanted)


def test_a_norm_or_bias_that_came_later_counts() -> None:
    model, other = made("qwen3"), made("qwen3")
    lowbit.fuse(model)
    logits(model, prompt())
    for changed in (model, other):
        for attn in attentions(changed):
            attn.k_norm = nn.Identity()
            attn.v_proj.bias = nn.Parameter(torch.linspace(-1, 1, attn.v_proj.out_features))
    torch.testing.assert_close(logits(model, prompt()), logits(other, prompt()), rtol=1e-4, atol=1e-4)
    model, other = made("llama"), made("llama")
    lowbit.fuse(model)
    logits(model, prompt())
    for changed in (model, other):
        for attn in attentions(changed):
            attn.q_proj.bias = nn.Parameter(torch.linspace(-1, 1, attn.q_proj.out_features))
    torch.testing.assert_close(logits(model, prompt()), logits(other, prompt()), rtol=1e-4, atol=1e-4)


def test_projections_of_different_formats_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama")
    for attn in attentions(model)[1:]:
        attn.v_proj = lowbit.QuantLinear.from_linear(attn.v_proj.to_linear(), CONFIGS["w4a8"].spec(torch.float32))
    wanted, said = logits(model, prompt()), answer(model, prompt(1))
    lowbit.fuse(model)
    with calls_of_layers(monkeypatch) as counts:
        assert torch.equal(answer(model, prompt(1), max_new_tokens=4), said[:, :13])
    assert counts == [1, 2, 2, 2]  # of the prompt the first layer alone, which has them merged
    assert all(isinstance(attn, Fused) for attn in attentions(model))
    torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_dict_is_what_is_multiplied(assign: bool) -> None:
    """Also after the weights were moved, which takes them out of the memory that they shared."""
    model, other = made("qwen2"), made("qwen2")
    for module in other.modules():
        if isinstance(module, lowbit.QuantLinear) and module.bias is not None:
            module.bias.data.add_(0.5)
    wanted = logits(other, prompt())
    lowbit.fuse(model)
    logits(model, prompt())
    assert model.state_dict().keys() == other.state_dict().keys()
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    torch.testing.assert_close(logits(model, prompt()), wanted, rtol=1e-4, atol=1e-4)
    model.bfloat16().float()
    for module in model.modules():
        if isinstance(module, lowbit.QuantLinear):
            module.weight.data = module.weight.data.clone()
    torch.testing.assert_close(logits(model, prompt()), logits(other.bfloat16().float(), prompt()), rtol=1e-4, atol=1e-4)


def test_weights_that_are_joined_again_in_inference_mode_can_still_be_trained_around() -> None:
    model = made("qwen2")
    lowbit.fuse(model)
    for module in model.modules():
        if isinstance(module, lowbit.QuantLinear):
            module.weight.data = module.weight.data.clone()
    with torch.inference_mode():
        model(prompt())
    model.train()(prompt(), labels=prompt()).loss.backward()
    assert all(attn.q_proj.bias.grad is not None for attn in attentions(model))


def test_a_fused_model_is_saved_as_it_was(tmp_path: Path) -> None:
    model = made("llama")
    wanted = logits(model, prompt())
    lowbit.fuse(model)
    logits(model, prompt())
    model.save_pretrained(tmp_path)
    fresh = transformers.LlamaForCausalLM._from_config(model.config, attn_implementation="lowbit").eval()
    lowbit.load(fresh, tmp_path)
    assert torch.equal(logits(fresh, prompt()), wanted)


@pytest.mark.parametrize("fuse", [False, True])
def test_from_pretrained_fuses_where_the_configuration_says_so(fuse: bool, tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "float")
    config = lowbit.LowbitConfig(CONFIGS["int8"], fuse=fuse)
    assert config.to_dict().get("fuse", False) is fuse
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    model.save_pretrained(tmp_path / "packed")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "packed")
    for loaded in (model, again):
        assert {isinstance(attn, Fused) for attn in attentions(loaded)} == {fuse}
    assert torch.equal(logits(again, prompt()), logits(model, prompt()))


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_a_gguf_file_is_fused_unless_it_is_asked_not_to(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import gguf_files

    from lowbit.huggingface.load_gguf import load_model

    file = gguf_files.write(tmp_path / "model.gguf", name)
    fused, plain = load_model(file, activations="float"), load_model(file, activations="float", fuse=False)
    ids = prompt() % 64
    assert all(isinstance(attn, Fused) for attn in attentions(fused))
    assert not any(isinstance(module, Fused) for module in plain.modules())
    torch.testing.assert_close(logits(fused, ids), logits(plain, ids), rtol=1e-4, atol=1e-4)


def test_dequantized_and_unfused_models_are_of_their_classes_again() -> None:
    model = made("llama")
    classes = [type(module) for module in model.modules()]
    lowbit.fuse(model)
    assert any(isinstance(module, Fused) for module in model.modules())
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True) if "MLP" not in cls.__name__)
    lowbit.dequantize_(model)
    assert not any(isinstance(module, Fused) for module in model.modules())
    assert not any(type(module).__name__.startswith("Fused") for module in model.modules())


def test_reasons_are_told() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    report = lowbit.fuse(model)
    assert "model.layers.0.self_attn" in report.left and report.left["model.layers.0.self_attn"] == "q_proj is Linear, no QuantLinear"
    assert "model.norm" in report
    model = made("llama")
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    report = lowbit.fuse(model)
    assert report.left == {"model.layers.0.self_attn": "hooks on q_proj"}
    assert "left: model.layers.0.self_attn: hooks on q_proj" in repr(report)


class HalfNorm(nn.Module):
    """An RMSNorm by its names alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x[..., :8].square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def test_norms_are_tried_not_guessed() -> None:
    assert norm_facts(nn.RMSNorm(16, eps=1e-3)) == {"eps": 1e-3, "offset": 0.0}
    llama = transformers.models.llama.modeling_llama.LlamaRMSNorm(16, eps=1e-6)
    assert norm_facts(llama) == {"eps": 1e-6, "offset": 0.0}
    llama.eps = llama.variance_epsilon
    llama.variance_epsilon = 1e-5  # what it says is what it computes with
    assert norm_facts(llama) == {"eps": 1e-5, "offset": 0.0}
    gemma = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(16, eps=1e-6)
    assert norm_facts(gemma) == {"eps": 1e-6, "offset": 1.0}
    assert norm_facts(HalfNorm()) is None and norm_facts(nn.LayerNorm(16)) is None
