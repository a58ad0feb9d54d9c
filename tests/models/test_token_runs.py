# SPDX-License-Identifier: Apache-2.0
"""A token of `generate` as one run of a program: for which models and arguments it is one, and that nothing differs
from the loop of transformers, which the same model takes without `FusedCausalLM._sample`."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import MODELS, answer, in_float, made, prompt, transformers
from torch import Tensor, nn

import lowbit
from lowbit.models.fused_causal_lm import FusedCausalLM
from lowbit.models.token_run import AHEAD, Parts, TokenRun, rotary_embeddings
from lowbit.quant.fused import unfuse

ONE_RUN = {name for name in MODELS if name != "phi3"}  # which has its own
LONG = AHEAD + 20  # tokens of an answer that looks at the model twice


def fused(name: str = "llama", config: str = "w4a8", **more: Any) -> nn.Module:
    model = made(name, config, **more)
    lowbit.fuse(model)
    return model


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each token that was asked for was a run."""
    seen: list[bool] = []
    logits = TokenRun.logits

    def noted(self: TokenRun, tokens: Tensor) -> Tensor | None:
        found = logits(self, tokens)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(TokenRun, "logits", noted)
    yield seen


def by_transformers(model: nn.Module, call: Callable[[nn.Module], Any]) -> Any:
    """The result of ``call`` with the loop of transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FusedCausalLM, "_sample")
        return call(model)


def assert_same(got: Any, wanted: Any) -> None:
    """Tensors bit for bit, in whatever holds them."""
    assert type(got) is type(wanted)
    if isinstance(wanted, Tensor):
        assert torch.equal(got, wanted)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert_same(got[name], wanted[name])
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, transformers.Cache):
        for one, other in zip(got.layers, wanted.layers, strict=True):
            assert type(one) is type(other) and one.get_seq_length() == other.get_seq_length()
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    else:
        assert got == wanted


@pytest.mark.parametrize("name", MODELS)
def test_models_whose_tokens_are_runs(name: str, runs: list[bool]) -> None:
    model = made(name)
    wanted = answer(model, prompt())
    report = lowbit.fuse(model)
    assert torch.equal(answer(model, prompt()), wanted)
    assert ("(model)" in report) == isinstance(model, FusedCausalLM) == (name in ONE_RUN)
    assert runs == ([True] * 11 if name in ONE_RUN else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(ONE_RUN))
def test_logits_of_long_answers(name: str, dtype: torch.dtype, runs: list[bool]) -> None:
    """Caches, windows and rotary embeddings go on beyond what is looked at ahead."""
    model = fused(name).to(dtype)
    options = dict(max_new_tokens=LONG, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
    got = answer(model, prompt(1), **options)
    assert runs == [True] * (LONG - 1)
    assert_same(got, by_transformers(model, lambda model: answer(model, prompt(1), **options)))


@pytest.mark.parametrize("rope", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_rotary_embeddings_ahead_are_those_of_each_token(rope: str, runs: list[bool]) -> None:
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    model = fused(rope_parameters=parameters, max_position_embeddings=16)
    parts, x = Parts(model), torch.zeros(1, 1, 64)
    with torch.no_grad():
        pairs = rotary_embeddings(parts, x, torch.arange(5, 45 if rope != "dynamic" else 6)[None])
        for at in range(pairs[0][0].shape[1]):
            wanted = model.model.rotary_emb(x, torch.tensor([[5 + at]]))
            assert torch.equal(pairs[0][0][:, at], wanted[0][:, 0]) and torch.equal(pairs[0][1][:, at], wanted[1][:, 0])
    options = dict(max_new_tokens=40, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
    got = answer(model, prompt(1), **options)
    assert runs == [True] * 39
    other = fused(rope_parameters=parameters, max_position_embeddings=16)
    assert_same(got, by_transformers(other, lambda model: answer(model, prompt(1), **options)))


def sampled(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(7)
    return answer(model, prompt(), do_sample=True, **options)


TOLD = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
PADDED = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
AS_RUNS: dict[str, Callable[[nn.Module], Any]] = {
    "one sequence": lambda model: answer(model, prompt(1)),
    "sampling": lambda model: sampled(model, top_k=20, top_p=0.9, temperature=0.7, repetition_penalty=1.2, **TOLD),
    "sampling of some": lambda model: sampled(model, num_return_sequences=3, max_new_tokens=20),
    "scores": lambda model: answer(model, prompt(), **TOLD),
    "processors": lambda model: answer(model, prompt(), no_repeat_ngram_size=2, min_new_tokens=6, **TOLD),
    "an end in the middle": lambda model: answer(model, prompt(), eos_token_id=[*range(30)], max_new_tokens=40),
    "an end of one": lambda model: answer(model, prompt(1), eos_token_id=[*range(30)], max_new_tokens=40),
    "one new token": lambda model: answer(model, prompt(), max_new_tokens=1),
    "no time": lambda model: answer(model, prompt(1), max_time=0.0),
    "max_length": lambda model: answer(model, prompt(1), max_new_tokens=None, max_length=14),
    "chunks of a prompt": lambda model: answer(model, prompt(1, 20), prefill_chunk_size=7),
    "a cache of the caller": lambda model: continued(model, transformers.DynamicCache(config=model.config)),
    "positions of each": lambda model: answer(model, prompt(), position_ids=torch.arange(18).view(2, 9), **TOLD),
    "logits of more tokens": lambda model: answer(model, prompt(), logits_to_keep=3, **TOLD),
    "other positions": lambda model: answer(model, prompt(1), position_ids=torch.arange(4, 13)[None], **TOLD),
}


def continued(model: nn.Module, cache: Any) -> list[Any]:
    """Two turns of a conversation with one cache."""
    first = answer(model, prompt(1), past_key_values=cache)
    lengths = [cache.get_seq_length()]
    second = answer(model, torch.cat([first, prompt(1, 5)], dim=1), past_key_values=cache, **TOLD)
    return [first, second, lengths]


@pytest.mark.parametrize("use", AS_RUNS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_uses_that_are_runs(name: str, use: str, runs: list[bool]) -> None:
    model = fused(name)
    got = AS_RUNS[use](model)
    assert all(runs) and bool(runs) == (use not in ("one new token", "no time"))
    assert_same(got, by_transformers(model, AS_RUNS[use]))


BY_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "beams": lambda model: answer(model, prompt(), num_beams=3, **TOLD),
    "no cache": lambda model: answer(model, prompt(), use_cache=False),
    "static cache": lambda model: answer(model, prompt(), cache_implementation="static", disable_compile=True),
    "hidden states": lambda model: answer(model, prompt(), output_hidden_states=True, return_dict_in_generate=True),
    "prompt lookup": lambda model: answer(model, prompt(1), prompt_lookup_num_tokens=3),
    "an assistant": lambda model: answer(model, prompt(1), assistant_model=fused()),
    "embeddings": lambda model: model.generate(
        inputs_embeds=model.model.embed_tokens(prompt()).detach(), max_new_tokens=5, do_sample=False
    ),
}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_batches_with_padding(name: str, runs: list[bool]) -> None:
    """Where a layer has a window, the mask is made by the model."""
    model = fused(name)
    for batch, options in ((prompt(), {}), (prompt(), {"do_sample": True}), (prompt(1), {"max_new_tokens": LONG})):

        def padded(model: nn.Module) -> Any:
            torch.manual_seed(1)
            return answer(model, batch, attention_mask=PADDED[: len(batch)], **TOLD | options)  # noqa: B023

        got = padded(model)
        assert runs and set(runs) == {name != "gemma3"}
        assert_same(got, by_transformers(model, padded))


def test_padding_in_a_cache_of_the_caller(runs: list[bool]) -> None:
    model = fused()

    def turns(model: nn.Module) -> list[Any]:
        cache = transformers.DynamicCache(config=model.config)
        first = answer(model, prompt(), attention_mask=PADDED, past_key_values=cache)
        ids = torch.cat([first, prompt(2, 4)], dim=1)
        mask = torch.cat([PADDED, torch.ones(2, ids.shape[1] - 9, dtype=torch.int64)], dim=1)
        return [first, answer(model, ids, attention_mask=mask, past_key_values=cache, **TOLD)]

    got = turns(model)
    assert runs == [True] * 22
    assert_same(got, by_transformers(model, turns))


@pytest.mark.parametrize("use", BY_CALLS)
def test_uses_that_are_calls_of_the_model(use: str, runs: list[bool]) -> None:
    model = fused()
    got = BY_CALLS[use](model)
    assert not any(runs)
    assert_same(got, by_transformers(model, BY_CALLS[use]))


def test_quantized_caches_and_other_attention(runs: list[bool]) -> None:
    from lowbit.models.quantized_cache import QuantizedCache

    model = fused()

    def said(model: nn.Module) -> Tensor:
        return answer(model, prompt(), past_key_values=QuantizedCache("int8"))

    assert_same(said(model), by_transformers(model, said))
    model.set_attn_implementation("sdpa")
    assert_same(answer(model, prompt()), by_transformers(model, lambda model: answer(model, prompt())))
    assert not any(runs)


def test_a_float_head_is_called(runs: list[bool]) -> None:
    model = in_float("Llama", {})
    int8 = lowbit.int8_weight_only()
    lowbit.quantize_(model, int8, filter_fn=lambda module, name: type(module) is nn.Linear and name != "lm_head")
    lowbit.fuse(model)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    got = answer(model, prompt(), **TOLD)
    assert runs == [True] * 11 and len(seen) == 12
    assert_same(got, by_transformers(model, lambda model: answer(model, prompt(), **TOLD)))
    lowbit.quantize_(model, int8, filter_fn=lambda module, name: name == "lm_head")
    got = answer(model, prompt(), **TOLD)
    assert_same(got, by_transformers(model, lambda model: answer(model, prompt(), **TOLD)))


@pytest.mark.parametrize("told", ["output_scores", "output_logits"])
def test_scores_do_not_hold_the_logits_of_the_prompt(told: str) -> None:
    said = answer(fused(), prompt(), logits_to_keep=0, return_dict_in_generate=True, **{told: True})
    kept = said.scores if told == "output_scores" else said.logits
    assert len(kept) == 12 and all(each.untyped_storage().nbytes() == each.nbytes for each in kept)


class Streamer:
    """Notes what it gets, and does something at one of the tokens."""

    def __init__(self, at: int = -1, does: Callable[[], Any] = lambda: None) -> None:
        self.at, self.does, self.seen = at, does, []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.tolist())
        if len(self.seen) == self.at:
            self.does()

    def end(self) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("batch", [1, 2])
def test_streamers_get_each_token(batch: int, runs: list[bool]) -> None:
    model, ours, theirs = fused(), Streamer(), Streamer()
    answer(model, prompt(batch), streamer=ours)
    by_transformers(model, lambda model: answer(model, prompt(batch), streamer=theirs))
    assert ours.seen == theirs.seen and ours.seen[-1] == "end"
    assert all(runs) and len(runs) == 11


class Stop(transformers.StoppingCriteria):
    """Ends each sequence at its own length; notes the shapes that it gets."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append((input_ids.clone(), None if scores is None else len(scores)))
        return torch.arange(len(input_ids)) < input_ids.shape[1] - 13


@pytest.mark.parametrize("batch", [1, 3])
def test_criteria_of_the_caller(batch: int, runs: list[bool]) -> None:
    model = fused()
    results = []
    for call in (lambda act: act(model), lambda act: by_transformers(model, act)):
        stop = Stop()
        results.append([call(lambda model: answer(model, prompt(batch), stopping_criteria=[stop], **TOLD)), stop.seen])  # noqa: B023
    assert_same(*results)
    assert runs and all(runs)


def changes(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Changes of the model by a streamer, in the middle of a generation."""
    return {
        "unfuse": lambda: unfuse(model),
        "dequantize": lambda: lowbit.dequantize_(model),
        "hook on a layer": lambda: model.model.layers[1].mlp.register_forward_hook(lambda m, a, y: y * 0.5),
        "hook on the model": lambda: model.register_forward_hook(lambda m, a, y: setattr(y, "logits", -y.logits)),
        "hook on the norm": lambda: model.model.norm.register_forward_hook(lambda m, a, y: -y),
        "hook on the embedding": lambda: model.model.embed_tokens.register_forward_hook(lambda m, a, y: -y),
        "hook on the head": lambda: model.lm_head.register_forward_hook(lambda m, a, y: -y),
        "other layer": lambda: setattr(model.model, "layers", model.model.layers[::-1]),
        "other head": lambda: setattr(model, "lm_head", nn.Linear(64, 97)),
        "eps": lambda: setattr(model.model.norm, "variance_epsilon", 1.0),
        "train": lambda: model.train(),
        "attention": lambda: model.set_attn_implementation("eager"),
        "record": lambda: setattr(model.model.config, "output_hidden_states", True),
    }


class Changing(transformers.StoppingCriteria):
    """A criterion that does something at one of the tokens."""

    def __init__(self, streamer: Streamer) -> None:
        self.streamer = streamer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.streamer.put(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool)


BY_CRITERIA = {"other layer", "other head", "eps", "record"}
"""Changes that only a criterion or a processor of others may make."""


@pytest.mark.parametrize("change", changes(nn.Module()))
def test_a_change_in_the_middle_counts_from_the_next_token_on(change: str) -> None:
    for by_streamer in (False,) if change in BY_CRITERIA else (False, True):
        results = []
        for ours in (True, False):
            model = fused()
            torch.manual_seed(3)
            streamer = Streamer(6, changes(model)[change])
            caller = {"streamer": streamer} if by_streamer else {"stopping_criteria": [Changing(streamer)]}
            call = lambda model: answer(model, prompt(1), **caller, **TOLD)  # noqa: B023, E731
            results.append(call(model) if ours else by_transformers(model, call))
        if change == "unfuse":  # a float32 sum in another order
            assert torch.equal(results[0].sequences, results[1].sequences)
        else:
            assert_same(*results)


@pytest.mark.parametrize("caller", [False, True])
def test_an_exception_of_a_streamer(caller: bool) -> None:
    """The cache has the tokens that were computed, and the model goes on."""
    caches = []
    for ours in (True, False):
        model = fused()
        cache = transformers.DynamicCache(config=model.config)

        def fail() -> None:
            raise KeyboardInterrupt

        options = {"past_key_values": cache} if caller else {}
        call = lambda model: answer(model, prompt(1), streamer=Streamer(5, fail), **options)  # noqa: B023, E731
        with pytest.raises(KeyboardInterrupt):
            call(model) if ours else by_transformers(model, call)
        caches.append(cache)
        assert torch.equal(answer(model, prompt(1)), answer(fused(), prompt(1)))
    if caller:
        assert_same(*caches)


def test_a_streamer_that_looks_at_the_cache() -> None:
    model = fused()
    lengths: list[list[int]] = []
    for ours in (True, False):
        cache, seen = transformers.DynamicCache(config=model.config), []

        class Looking(Streamer):
            def put(self, value: Tensor) -> None:
                seen.append(cache.get_seq_length())  # noqa: B023

        call = lambda model: answer(model, prompt(1), streamer=Looking(), past_key_values=cache)  # noqa: B023, E731
        call(model) if ours else by_transformers(model, call)
        lengths.append(seen)
    assert lengths[0] == lengths[1]


def test_threads_that_generate_with_one_model(runs: list[bool]) -> None:
    model = fused()
    wanted = {length: answer(model, prompt(1, length), max_new_tokens=30) for length in range(3, 9)}
    got: dict[int, Tensor] = {}

    def generate(length: int) -> None:
        got[length] = answer(model, prompt(1, length), max_new_tokens=30)

    threads = [threading.Thread(target=generate, args=(length,)) for length in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(got, wanted)
    assert all(runs)


def test_the_name_of_the_class_and_copies(tmp_path: Path, runs: list[bool]) -> None:
    model = fused("llama", "int8")
    wanted = answer(model, prompt())
    assert type(model).__name__ == "LlamaForCausalLM" and isinstance(model, transformers.LlamaForCausalLM)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        runs.clear()
        assert isinstance(other, FusedCausalLM) and torch.equal(answer(other, prompt()), wanted) and all(runs) and runs
    unfuse(model)
    assert type(model) is transformers.LlamaForCausalLM
    assert torch.equal(answer(model, prompt()), wanted)


class Around(nn.Module):
    """A decoder inside of another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_decoder_that_was_wrapped_is_called(runs: list[bool]) -> None:
    model = fused()
    wanted = answer(model, prompt())
    runs.clear()
    model.model = Around(model.model)
    assert torch.equal(answer(model, prompt()), wanted) and runs == [False] * 11


class OfItsOwn(transformers.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **kwargs)


class Shifted(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 0.5
        return out


@pytest.mark.parametrize(("cls", "reason"), [
    (OfItsOwn, "it has a prepare_inputs_for_generation of its own"),
    (Shifted, "it does not join embedding, layers, norm and head as the program does"),
])  # fmt: skip
def test_models_that_are_left(cls: type, reason: str) -> None:
    model = made("llama")
    model.__class__ = cls
    assert lowbit.fuse(model).left == {"(model)": reason} and type(model) is cls


def test_fuse_draws_no_random_numbers() -> None:
    model = made("llama")
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    lowbit.fuse(model)
    assert torch.equal(torch.rand(3), wanted)
