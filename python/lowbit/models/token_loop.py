# SPDX-License-Identifier: Apache-2.0
"""The loop of transformers' ``generate`` (greedy and sampling), in which one run of a program computes each token.

Between two tokens, it calls processors, criteria and streamers in Python, in the order of `GenerationMixin._sample`,
and it returns the same result.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lowbit import _C
from lowbit.models.fused_layer import cache_of
from lowbit.models.token_run import TokenRun, has_attention

_SERVED = {"attention_mask", "logits_to_keep", "past_key_values", "cache_params", "position_ids", "use_cache"}
"""The arguments of the model that the program supports."""
_BY_NUMBERS = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria}
_KNOWN = ("lowbit", "transformers")
"""Packages whose criteria, processors and streamers do not touch the model and its cache."""


def serves(config: Any, ids: Tensor, synced: bool, arguments: dict[str, Any]) -> bool:
    """Whether a program can compute the tokens, given the arguments of ``generate``.

    Args:
        config: the generation config.
        ids: the prompt ``[B, L]``.
        synced: whether this process continues until all other processes have finished.
        arguments: the arguments of the model.
    """
    given = {name for name, value in arguments.items() if value is not None}
    return (
        not synced and ids.is_cpu and ids.shape[0] > 0 and given <= _SERVED
        and arguments.get("use_cache") is True and type(cache_of(arguments)) is DynamicCache
        and (arguments.get("position_ids") is None or _is_table(arguments["position_ids"]))
        and (arguments.get("attention_mask") is None or _is_table(arguments["attention_mask"]))
        and not (config.output_attentions or config.output_hidden_states or config.compile_config)
        and not config.is_assistant
    )  # fmt: skip


def _is_table(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_cpu and given.dim() == 2


class Generation:
    """One call of ``generate`` with a batch of prompts.

    Args:
        model: a `FusedCausalLM`.
        config: the generation config.
        processors, criteria, streamer: the arguments of `GenerationMixin._sample`.
        arguments: the arguments of the model.
    """

    def __init__(
        self, model: Any, config: Any, processors: Any, criteria: Any, streamer: Any, arguments: dict[str, Any]
    ) -> None:
        self._model, self._config, self._arguments = model, config, arguments
        self._processors, self._criteria, self._streamer = processors, criteria, streamer
        self._run: TokenRun | None = None
        self._behind = 0
        """The number of tokens that ``arguments`` do not include yet. Only a call of the model needs them up to
        date."""
        told = config.return_dict_in_generate
        self._scores: tuple[Tensor, ...] | None = () if told and config.output_scores else None
        self._raw: tuple[Tensor, ...] | None = () if told and config.output_logits else None

    def result(self, prompt: Tensor) -> Any:
        """Return the result of ``generate`` for ``prompt [B, L]``."""
        model = self._model
        outputs = model._prefill(prompt, self._config, self._arguments, is_first_iteration=True)
        self._arguments = model._update_model_kwargs_for_generation(outputs, self._arguments)
        logits = outputs.logits[:, -1]
        del outputs  # the logits of a long prompt are large
        sequences = _Sequences(prompt)
        ends = _ends(self._criteria, prompt.shape[0], self._config._pad_token_tensor)
        self._begin_run()
        try:
            while True:
                with _C.OnCallerIfCrowded():  # the choice among 50,000 tokens is a region of torch's
                    if self._add(sequences, logits, ends):
                        break
                    logits = self._logits(sequences)
        finally:
            if self._run is not None:
                self._run.count()
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return sequences.ids()
        return GenerateDecoderOnlyOutput(
            sequences=sequences.ids(),
            scores=self._scores,
            logits=self._raw,
            past_key_values=cache_of(self._arguments),
        )

    def _begin_run(self) -> None:
        """Begin a run of tokens if the mask covers exactly the tokens in the cache and the next one."""
        cache = cache_of(self._arguments)
        mask, positions = map(self._arguments.get, ("attention_mask", "position_ids"))
        if not has_attention(self._model):  # what a token is for the states does not depend on those before it
            mask, positions = None, torch.zeros(1, 1, dtype=torch.long, device="cpu")
        if positions is not None and (mask is None or mask.shape[1] == cache.get_seq_length() + 1):
            changing = not all(map(_is_known, (*self._processors, *self._criteria)))
            watched = changing or (getattr(cache, "_is_user_defined", False) and not _is_known(self._streamer))
            self._run = TokenRun(self._model, cache, positions[:, -1:], mask, changing, watched)

    def _add(self, sequences: _Sequences, logits: Tensor, ends: _Ends | _EndOfOne) -> bool:
        """Choose the next tokens from ``logits [B, V]`` and add them; return whether they are the last ones."""
        told = self._raw is not None or self._scores is not None
        scores = logits.to(torch.float32, copy=told or bool(self._processors))  # no view of a long prompt's logits
        if self._raw is not None:
            self._raw += (scores,)
        if self._processors:
            scores = self._processors(sequences.ids(), scores)
        if self._scores is not None:
            self._scores += (scores,)
        if self._config.do_sample:
            tokens = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        tokens = ends.padded(tokens)
        sequences.add(tokens)
        ended = ends.end(sequences, self._scores)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        return ended

    def _logits(self, sequences: _Sequences) -> Tensor:
        """Return the logits ``[B, V]`` after the last tokens, from the program or from a call of the model."""
        run = self._run
        logits = None if run is None else run.logits(sequences.last[:, None])
        if logits is not None:
            self._behind += 1
            return logits[:, -1]
        if run is not None:
            run.skip()
        model, arguments = self._model, self._arguments
        if self._behind:
            arguments = model._update_model_kwargs_for_generation({}, arguments, num_new_tokens=self._behind)
            self._behind = 0
        inputs = model.prepare_inputs_for_generation(sequences.ids(), next_sequence_length=1, **arguments)
        outputs = model(**inputs, return_dict=True)
        self._arguments = model._update_model_kwargs_for_generation(outputs, arguments)
        return outputs.logits[:, -1]


def _is_known(called: Any) -> bool:
    """Whether this criterion, processor or streamer (or None) belongs to a known package and calls no user function."""
    package = type(called).__module__.partition(".")[0]
    return called is None or package in _KNOWN and not hasattr(called, "_prefix_allowed_tokens_fn")


class _Sequences:
    """The prompt and the new tokens. `ids` joins them into one tensor."""

    def __init__(self, prompt: Tensor) -> None:
        self._ids, self._new = prompt, []
        self.length = prompt.shape[1]
        self.last: Tensor = prompt

    def add(self, tokens: Tensor) -> None:
        """Append one token ``[B]`` to each sequence."""
        self._new.append(tokens[:, None])
        self.last = tokens
        self.length += 1

    def ids(self) -> Tensor:
        """Return all tokens ``[B, length]``."""
        if self._new:
            self._ids, self._new = torch.cat([self._ids, *self._new], dim=-1), []
        return self._ids


class _Ends:
    """The stopping criteria of a batch, evaluated with tensors."""

    def __init__(self, criteria: Any, batch: int, pad: Tensor | None) -> None:
        self._criteria = criteria
        self._pad = pad if any(hasattr(each, "eos_token_id") for each in criteria) else None
        self._unfinished = torch.ones(batch, dtype=torch.long, device="cpu")

    def padded(self, tokens: Tensor) -> Tensor:
        """Return the tokens, with padding for sequences that have ended."""
        if self._pad is None:
            return tokens
        return tokens * self._unfinished + self._pad * (1 - self._unfinished)

    def end(self, sequences: _Sequences, scores: Any) -> bool:
        """Update the unfinished sequences; return whether all have ended."""
        self._unfinished = self._unfinished & ~self._criteria(sequences.ids(), scores)
        return not self._unfinished.any()


class _EndOfOne:
    """The stopping criteria of one sequence, evaluated with Python numbers. It supports transformers' criteria of
    length, end tokens and time."""

    def __init__(self, criteria: Any) -> None:
        self._lengths = [each for each in criteria if type(each) is MaxLengthCriteria]
        self._times = [each for each in criteria if type(each) is MaxTimeCriteria]
        eos = (each.eos_token_id.flatten().tolist() for each in criteria if type(each) is EosTokenCriteria)
        self._eos = {token for tokens in eos for token in tokens}

    def padded(self, tokens: Tensor) -> Tensor:
        return tokens

    def end(self, sequences: _Sequences, scores: Any) -> bool:
        length = sequences.length
        ended = bool(self._eos) and sequences.last.item() in self._eos
        for each in self._lengths:
            if length >= each.max_length:
                ended = True
            elif each.max_position_embeddings is not None and length > each.max_position_embeddings:
                each(torch.empty(1, length, device="meta"), scores)  # called for its warning
        return ended or any(time.time() - each.initial_timestamp > each.max_time for each in self._times)


def _ends(criteria: Any, batch: int, pad: Tensor | None) -> _Ends | _EndOfOne:
    if batch == 1 and _BY_NUMBERS.issuperset(map(type, criteria)):
        return _EndOfOne(criteria)
    return _Ends(criteria, batch, pad)
