# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="lowbit" knows every argument that a model of the installed transformers hands to its attention."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tiny_architectures import tiny_config, tiny_model  # noqa: E402
from tiny_inputs import inputs  # noqa: E402
from transformers.utils import TransformersKwargs  # noqa: E402

from lowbit.models import attention_arguments  # noqa: E402
from lowbit.models.attention_masks import lowbit_mask, wants_eager_mask  # noqa: E402
from lowbit.models.lowbit_attention import lowbit_attention  # noqa: E402
from lowbit.models.quantized_cache import QuantizedCache  # noqa: E402

KNOWN = {*attention_arguments.SERVED, *attention_arguments.WITHOUT_EFFECT, *attention_arguments.REFUSED}


@functools.cache
def sources() -> dict[str, str]:
    """The models of transformers."""
    folder = Path(transformers.__file__).parent / "models"
    return {path.name: path.read_text() for path in sorted(folder.glob("*/modeling_*.py"))}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call of an attention function. It alone is parsed: all of the files would take a minute."""
    for name, text in sources().items():
        for begin in re.finditer(r"\battention_interface\(", text):
            end, depth = begin.end(), 1
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            yield name, ast.parse(text[begin.start() : end], mode="eval").body


def test_every_keyword_of_transformers_is_known() -> None:
    found = list(calls())
    assert len(found) > 100
    unknown = {(name, keyword.arg) for name, call in found for keyword in call.keywords if keyword.arg} - {
        (name, known) for name, _ in found for known in KNOWN
    }
    assert not unknown, "attention_arguments.py has to serve or refuse these, or to say why they change nothing"
    assert max(len(call.args) for _, call in found) == 5  # module, query, key, value, attention_mask
    assert not TransformersKwargs.__annotations__.keys() - KNOWN


# Models that do more for "sdpa" or "eager" than for other names, and why "lowbit" gives the same result all the same.
LOOK_AT_THE_NAME = {
    "modeling_axk2.py": "indices", "modeling_deepseek_v32.py": "indices", "modeling_dots3_note.py": "indices",
    "modeling_glm_moe_dsa.py": "indices", "modeling_hy_v4.py": "indices", "modeling_mistral_large4.py": "indices",
    "modeling_minimax_m3_vl.py": "block_indices",
    "modeling_gemma4.py": "the mask is never None", "modeling_gemma4_unified.py": "the mask is never None",
    "modeling_glm5_next.py": "a floating mask in place of a boolean one",
    "modeling_gpt2.py": "reorder_and_upcast_attn, eager's own", "modeling_decision_transformer.py": "reorder_and_upcast_attn, eager's own",
    "modeling_falcon.py": "calls no attention function: a formula of its own for other names",
    "modeling_qwen2_5_omni.py": "a speech part that is never asked for its mask by another name",
    "modeling_timm_backbone.py": "timm's own attention", "modeling_timm_wrapper.py": "timm's own attention",
}  # fmt: skip


def test_models_that_look_at_the_name_are_known() -> None:
    compared = re.compile(r"\b_attn_implementation (==|!=|in|not in) .*(sdpa|eager)")
    found = {name for name, text in sources().items() if compared.search(text)}
    assert found == LOOK_AT_THE_NAME.keys()


def tokens_with_left_padding() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :3] = 0
    return torch.arange(2, 26).view(2, 12), mask


WITHOUT_KEYS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "OlmoHybridForCausalLM", "NemotronHForCausalLM",
                "RecurrentGemmaForCausalLM", "Lfm3ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM")  # fmt: skip
OF_THEIR_OWN = (
    "Inkling2ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Gemma4ForCausalLM",
    "GptOssForCausalLM",
)


@pytest.mark.parametrize("name", [*WITHOUT_KEYS, *OF_THEIR_OWN])
def test_hybrids_and_masks_of_their_own(name: str) -> None:
    """Logits of a padded prompt, and greedy text, are those of eager attention: layers of linear attention and state
    spaces have transformers' own cache, and what a model does with the mask is done to the one it counts on."""
    model = tiny_model(name, tiny_config(getattr(transformers, name).config_class))
    tokens, mask = tokens_with_left_padding()
    found = []
    for implementation in ("eager", "lowbit"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask).logits[mask.bool()]
        text = model.generate(
            tokens, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
        )
        found.append((logits, text))
    (wanted, text), (ours, our_text) = found
    assert model.config._attn_implementation == "lowbit"
    assert (ours - wanted).norm() < 1e-3 * wanted.norm()
    assert torch.equal(our_text, text)


OTHER_KINDS = ("BridgeTowerModel", "InternVLForConditionalGeneration", "Lfm3VlForConditionalGeneration", "HubertForCTC", "Glm5NextTextModel")


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_what_encoders_of_images_and_sound_hand_on(name: str) -> None:
    """Sizes of images and the like change nothing; no mask hides nothing where a model counts on eager attention,
    also in a layer that calls itself causal (BridgeTower's)."""
    model = tiny_model(name, tiny_config(getattr(transformers, name).config_class))
    given, found = inputs(model), []
    for implementation in ("eager", "lowbit"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            output = model(**given)[0]
        mask = given["attention_mask"].bool()
        found.append(output[mask] if output.shape[:2] == mask.shape else output)
    assert model.config._attn_implementation == "lowbit"
    assert (found[1] - found[0]).norm() < 1e-3 * found[0].norm()


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_logits_of_the_last_tokens_alone(kept: int) -> None:
    """Gemma 4 drops the queries of the other tokens in its last layers: what is causal is said by a mask alone then."""
    layers = ["sliding_attention", "full_attention"] * 2
    config = tiny_config(transformers.Gemma4TextConfig, layer_types=layers, num_hidden_layers=4, num_kv_shared_layers=2)
    model = tiny_model("Gemma4ForCausalLM", config)
    tokens, _ = tokens_with_left_padding()
    found = []
    for implementation in ("eager", "lowbit"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(tokens, logits_to_keep=kept).logits)
    assert (found[1] - found[0]).norm() < 1e-3 * found[0].norm()


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def eager(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """In float64; ``mask`` boolean ``[B, Hq, L, S]``."""
    query, key, value = (states.double() for states in (query, key, value))
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    scores = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()], dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def test_sinks_of_each_query_and_their_gradient() -> None:
    query, key, value, sinks = heads(2, 4, 5, 32), heads(2, 2, 5, 32), heads(2, 2, 5, 32), heads(2, 4, 5, 1)
    out, _ = lowbit_attention(torch.nn.Module(), query, key, value, None, sinks=sinks)
    wanted = eager(query, key, value, torch.ones(5, 5, dtype=torch.bool).tril(), sinks)
    weight = torch.randn_like(out)
    for ours, theirs in zip(
        (out, *torch.autograd.grad((out * weight).sum(), (query, key, value, sinks))),
        (wanted, *torch.autograd.grad((wanted * weight).sum(), (query, key, value, sinks))),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompt", [0, 7])
def test_sinks_over_a_quantized_cache(prompt: int) -> None:
    cache, query, sinks = QuantizedCache("int8"), heads(2, 4, 5, 32), heads(2, 4, 5, 1)
    if prompt:
        cache.update(heads(2, 2, prompt, 32), heads(2, 2, prompt, 32), 0)
    key, value = cache.update(heads(2, 2, 5, 32), heads(2, 2, 5, 32), 0)
    with torch.no_grad():
        out, _ = lowbit_attention(torch.nn.Module(), query, key, value, None, sinks=sinks)
        seen = torch.ones(5, prompt + 5, dtype=torch.bool).tril(prompt)
        torch.testing.assert_close(out, eager(query, key + 0, value + 0, seen, sinks).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("floating", [False, True])
def test_keys_that_are_chosen_for_each_query(floating: bool) -> None:
    query, key, value = heads(2, 4, 6, 32), heads(2, 2, 6, 32), heads(2, 2, 6, 32)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    mask = torch.zeros(2, 1, 6, 6).masked_fill(~causal, torch.finfo(torch.float32).min) if floating else causal
    indices = torch.stack([torch.randperm(6)[:3] for _ in range(12)]).view(2, 6, 3).int()
    indices[..., 0] = 0  # each query sees one key at least
    chosen = torch.zeros(2, 6, 6, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    out, _ = lowbit_attention(torch.nn.Module(), query, key, value, mask, indices=indices)
    torch.testing.assert_close(out, eager(query, key, value, causal & chosen).float(), rtol=1e-4, atol=1e-5)


def test_blocks_of_keys_that_are_chosen() -> None:
    """As MiniMax M3's own mask says it, for a length that is no multiple of the block."""
    kind = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLIndexer
    module = torch.nn.Module()
    module.indexer = indexer = kind.__new__(kind)
    torch.nn.Module.__init__(indexer)
    indexer.block_size, indexer.config = 4, transformers.PreTrainedConfig(num_attention_heads=4)
    query, key, value = heads(2, 4, 10, 32), heads(2, 2, 10, 32), heads(2, 2, 10, 32)
    indices = torch.randint(-1, 3, (2, 2, 10, 2))
    indices[..., 0] = 0
    for mask in (None, torch.ones(2, 1, 10, 10, dtype=torch.bool).tril()):
        theirs = indexer.build_block_mask(
            indices, mask, 10, torch.float32, torch.device("cpu"), torch.arange(10).expand(2, -1)
        )
        out, _ = lowbit_attention(module, query, key, value, mask, block_indices=indices)
        torch.testing.assert_close(out, eager(query, key, value, theirs == 0).float(), rtol=1e-4, atol=1e-5)


def test_what_is_not_known_or_not_served_is_refused_by_name() -> None:
    q = torch.randn(1, 2, 3, 32)

    def call(mask: torch.Tensor | None = None, **others: object) -> None:
        lowbit_attention(torch.nn.Module(), q, q, q, mask, **others)

    with pytest.raises(ValueError, match=r"window_bias must be None, got Tensor of shape \[3\]"):
        call(window_bias=torch.ones(3))
    with pytest.raises(ValueError, match="temperature must be None, got 0.5"):
        call(temperature=0.5)
    with pytest.raises(NotImplementedError, match="cache: a paged cache"):
        call(cache=object())
    with pytest.raises(NotImplementedError, match="attention weights"):
        call(output_attentions=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q names 2 packed sequences, which no mask"):
        call(cu_seq_lens_q=torch.tensor([0, 1, 3]))
    call(torch.eye(3, dtype=torch.bool)[None, None], cu_seq_lens_q=torch.tensor([0, 1, 2, 3]))
    call(
        cu_seq_lens_q=torch.tensor([0, 3]), output_attentions=False, window_bias=None, sliding_window=2, use_cache=True
    )


def test_a_model_without_sdpa_support_gets_the_mask_of_eager_attention() -> None:
    assert transformers.DeepseekV4ForCausalLM and transformers.Inkling2ForCausalLM  # imported, as where a model calls
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 4, "dtype": torch.float32}
    theirs = lowbit_mask(**sizes, config=transformers.DeepseekV4Config())
    assert theirs.dtype == torch.float32 and theirs.shape == (1, 1, 4, 4)
    assert lowbit_mask(**sizes, config=transformers.LlamaConfig()) is None  # causal is said by is_causal
    assert lowbit_mask(**sizes, config=transformers.Gemma4TextConfig()).dtype == torch.bool
    assert wants_eager_mask(transformers.Inkling2TextConfig()) and not wants_eager_mask(transformers.GptOssConfig())
