# SPDX-License-Identifier: Apache-2.0
"""A small random Llama of transformers: attn_implementation="lowbit" writes the same text as eager attention, with and without a quantized cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import aot_module_simplified
from torch import Tensor

transformers = pytest.importorskip("transformers")

import lowbit  # noqa: E402
from lowbit import _C  # noqa: E402
from lowbit.models.quantized_cache import CachedStates, QuantizedCache  # noqa: E402


def llama(dtype: torch.dtype = torch.float32, **changes: int) -> torch.nn.Module:
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).to(dtype).eval()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return llama()


def text(model: torch.nn.Module, implementation: str, ids: Tensor, **options: object) -> Tensor:
    model.set_attn_implementation(implementation)
    return model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None, **options)


def ids(batch: int = 2, length: int = 19) -> Tensor:
    return torch.randint(0, 97, (batch, length))


def test_greedy_text_is_that_of_eager_attention(model: torch.nn.Module) -> None:
    prompt = ids()
    assert torch.equal(text(model, "lowbit", prompt), text(model, "eager", prompt))
    assert _C.last_kernel("attention_forward").startswith("attention_forward_decode_float32_")


def test_left_padding_is_respected(model: torch.nn.Module) -> None:
    prompt, mask = ids(3, 12), torch.ones(3, 12, dtype=torch.int64)
    mask[0, :7] = 0
    assert torch.equal(text(model, "lowbit", prompt, attention_mask=mask), text(model, "eager", prompt, attention_mask=mask))


def test_a_static_cache_works(model: torch.nn.Module) -> None:
    prompt = ids()
    assert torch.equal(text(model, "lowbit", prompt, cache_implementation="static", disable_compile=True), text(model, "eager", prompt))


def test_an_int8_cache_writes_the_same_text(model: torch.nn.Module) -> None:
    prompt, mask = ids(3, 30), torch.ones(3, 30, dtype=torch.int64)
    mask[1, :11] = 0
    wanted = text(model, "eager", prompt, attention_mask=mask)
    assert torch.equal(text(model, "lowbit", prompt, attention_mask=mask, past_key_values=QuantizedCache("int8")), wanted)
    assert _C.last_kernel("decode").startswith("decode_int8_")


@pytest.mark.parametrize("format,worst", [("int8", 0.04), ("int4", 0.4)])
def test_logits_after_the_cache_are_close(model: torch.nn.Module, format: str, worst: float) -> None:
    tokens, cache = ids(2, 60), QuantizedCache(format)
    model.set_attn_implementation("lowbit")
    with torch.no_grad():
        wanted = model(tokens).logits
        first = model(tokens[:, :20], past_key_values=cache).logits
        chunk = model(tokens[:, 20:59], past_key_values=cache).logits  # a second prompt chunk: many queries over codes
        last = model(tokens[:, 59:], past_key_values=cache).logits
    assert cache.get_seq_length() == 60
    assert torch.allclose(first, wanted[:, :20], atol=1e-4)  # attended to in float
    for part, whole in ((chunk, wanted[:, 20:59]), (last, wanted[:, 59:])):
        assert (part - whole).norm() / whole.norm() < worst


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_cache_works_with_other_attention_too(model: torch.nn.Module, implementation: str) -> None:
    tokens = ids(2, 40)
    logits = []
    for name in ("lowbit", implementation):
        model.set_attn_implementation(name)
        cache = QuantizedCache("int8")
        with torch.no_grad():
            model(tokens[:, :39], past_key_values=cache)
            logits.append(model(tokens[:, 39:], past_key_values=cache).logits)
    assert torch.allclose(logits[0], logits[1], atol=1e-3)


def test_beam_search_reorders_the_cache(model: torch.nn.Module) -> None:
    prompt = ids()
    ours, dequantized = (text(model, name, prompt, num_beams=3, past_key_values=QuantizedCache("int8")) for name in ("lowbit", "sdpa"))
    assert torch.equal(ours, dequantized)
    assert torch.equal(text(model, "lowbit", prompt, num_beams=3), text(model, "eager", prompt, num_beams=3))


def test_crop_goes_back(model: torch.nn.Module) -> None:
    tokens, cache = ids(1, 30), QuantizedCache("int8")
    model.set_attn_implementation("lowbit")
    with torch.no_grad():
        model(tokens[:, :20], past_key_values=cache)
        wanted = model(tokens[:, 20:21], past_key_values=cache).logits
        cache.crop(-1)
        assert cache.get_seq_length() == 20
        assert torch.equal(model(tokens[:, 20:21], past_key_values=cache).logits, wanted)
    with pytest.raises(ValueError, match="negative"):
        cache.layers[0].crop(3)


def test_bfloat16_model() -> None:
    model, tokens, cache = llama(torch.bfloat16), ids(1, 25), QuantizedCache("int8")
    model.set_attn_implementation("lowbit")
    with torch.no_grad():
        wanted = model(tokens).logits
        model(tokens[:, :24], past_key_values=cache)
        last = model(tokens[:, 24:], past_key_values=cache).logits
    assert last.dtype == torch.bfloat16
    assert (last - wanted[:, 24:]).norm() / wanted[:, 24:].norm() < 0.05


def assert_steps_agree(model: torch.nn.Module, compiled: Callable[..., object], caches: list[object]) -> None:
    """A prompt of 20 tokens and 10 steps, in eager mode over the first cache and compiled over the second."""
    tokens = ids(2, 30)
    with torch.no_grad():
        for cache in caches:
            model(tokens[:, :20], past_key_values=cache)
        for i in range(20, 30):
            wanted = model(tokens[:, i : i + 1], past_key_values=caches[0]).logits
            found = compiled(input_ids=tokens[:, i : i + 1], past_key_values=caches[1]).logits
            assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("implementation", ["lowbit", "sdpa"])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_compiled_model_decodes_with_the_cache(model: torch.nn.Module, format: str, implementation: str) -> None:
    """fullgraph; "lowbit" multiplies the codes, and the dequantized states that other implementations get are not computed."""
    torch._dynamo.reset()
    model.set_attn_implementation(implementation)
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, example: list[object]) -> object:
        return aot_module_simplified(graph, example, fw_compiler=lambda inner, _: graphs.append(inner) or inner, decompositions={})

    compiled = torch.compile(model.forward, fullgraph=True, backend=look)
    caches = [QuantizedCache(format), QuantizedCache(format)]
    assert_steps_agree(model, compiled, caches)
    assert caches[1].get_seq_length() == 30 and len(graphs) <= 3
    targets = " ".join(str(node.target) + str(node.args[:1]) for graph in graphs for node in graph.graph.nodes if node.op == "call_function")
    assert ("lowbit.decode" in targets) == (implementation == "lowbit")
    assert ("kv_dequantize_" in targets) == (implementation != "lowbit")


@pytest.mark.parametrize("make", [transformers.DynamicCache, lambda: transformers.StaticCache(config=llama().config, max_cache_len=40)])
def test_a_compiled_model_decodes_with_float_caches(model: torch.nn.Module, make: Callable[[], object]) -> None:
    torch._dynamo.reset()
    model.set_attn_implementation("lowbit")
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert_steps_agree(model, compiled, [make(), make()])


def test_training_gives_the_gradients_of_eager_attention(model: torch.nn.Module) -> None:
    tokens, gradients = ids(1, 21), []
    for name in ("lowbit", "eager"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert torch.allclose(*gradients, atol=1e-5, rtol=1e-3)


def test_cached_states_are_dequantized_by_any_operation() -> None:
    cache = QuantizedCache("int8")
    k, v = torch.randn(1, 2, 5, 32), torch.randn(1, 2, 5, 32)
    assert cache.update(k, v, 0)[0] is k  # the first prompt stays float
    keys, values = cache.update(k, v, 0)
    assert isinstance(keys, CachedStates) and keys.shape == (1, 2, 10, 32)
    assert torch.equal(keys + 0, cache.layers[0].store.keys()) and torch.equal(values * 1, cache.layers[0].store.values())


@pytest.mark.parametrize(("config", "format"), [(None, "int4"), ({}, "int4"), ({"nbits": 4}, "int4"), ({"nbits": 8}, "int8")], ids=str)
def test_a_quantized_cache_that_generate_is_asked_for_is_ours(model: torch.nn.Module, config: dict | None, format: str) -> None:
    prompt = ids()
    out = text(model, "lowbit", prompt, cache_implementation="quantized", cache_config=config, return_dict_in_generate=True)
    assert type(out.past_key_values) is QuantizedCache and out.past_key_values.format == format
    assert torch.equal(out.sequences, text(model, "lowbit", prompt, past_key_values=QuantizedCache(format)))
    assert _C.last_kernel("decode").startswith(f"decode_{format}_")


@pytest.mark.parametrize("config", [{"backend": "hqq"}, {"nbits": 2}, {"q_group_size": 32}], ids=str)
def test_another_quantized_cache_is_transformers_own_and_its_error_names_ours(model: torch.nn.Module, config: dict) -> None:
    with pytest.raises(ImportError, match=r"You need to install(.|\n)*past_key_values=lowbit.QuantizedCache"):
        text(model, "lowbit", ids(), cache_implementation="quantized", cache_config=config)
    with pytest.raises(ImportError, match="You need to install") as without:
        text(model, "sdpa", ids(), cache_implementation="quantized", cache_config=config)
    assert "lowbit" not in str(without.value)
    for implementation in ("lowbit", "sdpa"):
        out = text(model, implementation, ids(), cache_implementation="quantized", cache_config={"backend": "fp8"}, return_dict_in_generate=True)
        assert type(out.past_key_values) is transformers.QuantizedCache


def test_a_quantized_cache_of_windows_is_refused_as_transformers_does() -> None:
    config = transformers.Qwen2Config(**SMALL, intermediate_size=96, num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    model = transformers.Qwen2ForCausalLM(config).eval()
    with pytest.raises(ValueError, match="invalid layer"):
        text(model, "lowbit", ids(), cache_implementation="quantized")


def test_what_it_has_not_is_refused_by_name() -> None:
    from lowbit.models.lowbit_attention import lowbit_attention

    q = torch.randn(1, 2, 3, 32)
    with pytest.raises(NotImplementedError, match="attention weights"):
        lowbit_attention(torch.nn.Module(), q, q, q, None, output_attentions=True)
    with pytest.raises(ValueError, match="format must be int8 or int4"):
        QuantizedCache("fp8")


SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
WITH_ATTENTION = {
    "llama": lambda: llama(),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=64, n_layer=2, n_head=4)),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64)),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL, intermediate_size=96)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, intermediate_size=96)),
    "t5": lambda: transformers.T5EncoderModel(transformers.T5Config(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_attention_weights_are_refused_by_every_model(name: str, compiled: bool) -> None:
    """Whether the model hands output_attentions on or records what its layers return."""
    model = WITH_ATTENTION[name]().eval()
    model.set_attn_implementation("lowbit")
    torch._dynamo.reset()
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(Exception, match="never holds the attention weights"):
        call(ids(), output_attentions=True)
    torch._dynamo.reset()
    with torch.no_grad():
        assert call(ids(), output_hidden_states=True).hidden_states is not None


def test_a_block_is_compiled_while_another_thread_collects_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' collector is one of the process while anything is traced: neither its content nor its guards count."""
    from transformers.utils.output_capturing import _active_collector

    model = llama().eval()
    model.set_attn_implementation("lowbit")
    prompt = ids()
    wanted = model(prompt).logits
    torch._dynamo.reset()
    lowbit.compile_blocks(model, backend="eager", fullgraph=True)
    monkeypatch.setattr(_active_collector, "set", lambda value: None)  # as of a thread that began before the tracing
    monkeypatch.setattr(_active_collector, "compiling", True)
    monkeypatch.setattr(_active_collector, "global_var", {"attentions": []})
    torch.testing.assert_close(model(prompt).logits, wanted)


def test_the_name_is_there_without_an_import_of_ours(python: Callable[..., str], subtests: pytest.Subtests) -> None:
    """Whichever is imported first, and `import lowbit` imports no transformers."""
    model = """
config = transformers.LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, attn_implementation="lowbit")
assert transformers.LlamaForCausalLM(config).config._attn_implementation == "lowbit"
print("there")
"""
    for first in ("import lowbit, sys; assert 'transformers' not in sys.modules; import transformers", "import transformers; import torch",
                  "import transformers; transformers.PreTrainedModel; import lowbit"):  # fmt: skip
        with subtests.test(first):
            assert "there" in python("import sys\n" + first.replace("; ", "\n") + model)


@pytest.mark.parametrize("module", ["models.attention_masks", "models.lowbit_attention", "models.fuse", "huggingface.quantizer"])
def test_the_name_is_there_whichever_of_our_modules_is_imported_first(module: str, python: Callable[..., str]) -> None:
    """They import transformers, which is joined in the middle of that."""
    code = f"import lowbit.{module}, transformers.modeling_utils as theirs; from lowbit.peers.when_imported import failures"
    assert "there" in python(f"{code}\nassert 'lowbit' in theirs.ALL_ATTENTION_FUNCTIONS and not failures, failures\nprint('there')")


def gemma2(softcap: float | None) -> torch.nn.Module:
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, sliding_window=8, attn_logit_softcapping=softcap, query_pre_attn_scalar=1, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("softcap", [2.0, 50.0, None])
def test_softcap_and_sliding_windows_of_gemma_2(softcap: float | None) -> None:
    model, prompt, mask = gemma2(softcap), ids(2, 30), torch.ones(2, 30, dtype=torch.int64)
    mask[0, :7] = 0
    logits = []
    for implementation in ("eager", "lowbit"):
        model.set_attn_implementation(implementation)
        logits.append(model(prompt, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(text(model, "lowbit", prompt, attention_mask=mask), text(model, "eager", prompt, attention_mask=mask))


def test_softcap_with_a_quantized_cache() -> None:
    model, prompt = gemma2(3.0), ids(2, 30)
    model.set_attn_implementation("lowbit")
    wanted = model(prompt).logits[:, 10:]
    cache = QuantizedCache("int8")
    model(prompt[:, :10], past_key_values=cache)
    steps = [model(prompt[:, 10:17], past_key_values=cache).logits]
    steps += [model(prompt[:, i : i + 1], past_key_values=cache).logits for i in range(17, 30)]
    assert (torch.cat(steps, 1) - wanted).abs().max() <= 0.05 * wanted.abs().max()


@pytest.mark.parametrize("padded", [False, True])
def test_the_position_bias_of_t5(padded: bool) -> None:
    sizes = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()
    prompt, mask = ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    if padded:
        mask[0, 7:] = 0
    results = []
    for implementation in ("eager", "lowbit"):
        model.set_attn_implementation(implementation)
        out = model(input_ids=prompt, attention_mask=mask, decoder_input_ids=prompt)
        model.zero_grad()
        out.logits.pow(2).mean().backward()
        bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.clone()
        results.append((out.logits.detach(), bias, text(model, implementation, prompt, attention_mask=mask)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-5)
    assert torch.equal(results[0][2], results[1][2])


def test_continuous_batching_on_our_attention(model: torch.nn.Module) -> None:
    """transformers takes only names of its own there; by install() its "sdpa" is ours."""
    prompts = [ids(1, n)[0].tolist() for n in (5, 12, 9)]
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    lowbit.attention.install()
    try:
        results = model.generate_batch(prompts, generation_config=config)
        assert _C.last_kernel("attention_forward") or _C.last_kernel("decode")
    finally:
        lowbit.attention.uninstall()
    written = sorted((tuple(r.prompt_ids), tuple(r.generated_tokens)) for r in results.values())
    wanted = [(tuple(p), tuple(text(model, "eager", torch.tensor([p]))[0, len(p) : len(p) + 8].tolist())) for p in prompts]
    assert written == sorted(wanted)


def test_a_crop_that_one_layer_refuses_changes_none() -> None:
    cache = QuantizedCache("int8")
    for layer, length in ((0, 9), (1, 4)):
        cache.update(torch.randn(1, 2, length, 32), torch.randn(1, 2, length, 32), layer)
    for count in (-5, 1):
        with pytest.raises(ValueError, match="crop"):
            cache.crop(count)
        assert [layer.get_seq_length() for layer in cache.layers] == [9, 4]
    cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [7, 2]
