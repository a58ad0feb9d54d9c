# SPDX-License-Identifier: Apache-2.0
"""``lowbit chat FILE.gguf``: a conversation in a terminal or a pipe, with the answers streamed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from lowbit.huggingface.load_gguf import load_gguf
from lowbit.models.fuse import fuse

_SAID_BELOW = 256
"""Tokens that are left of the context when a remark says so."""


def chat(
    path: str | Path,
    prompts: Iterable[str] | None = None,
    *,
    activations: str | None = None,
    system: str = "",
    max_new_tokens: int = 512,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int | None = None,
) -> str:
    """Answer each prompt on the standard output, and return how fast that was. Remarks go to the standard error.

    Args:
        path: a GGUF file, or a folder that ``from_pretrained`` of transformers reads.
        prompts: the questions of one conversation, in order; None: the lines of the standard input, to its end.
        activations: the argument of `load_gguf`, for a GGUF file only; None: "int8".
        system: the system prompt, before the first question.
        max_new_tokens: the max number of tokens of each answer.
        temperature, top_p: the parameters of sampling; temperature 0 always takes the likeliest token.
        seed: the seed of sampling; None: another one each time.

    Raises:
        FileNotFoundError, ValueError: `load_gguf` or ``from_pretrained`` raises it; a number is out of its range; a
            line is not UTF-8.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"chat: temperature must be 0 or more, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"chat: top_p must be above 0 and at most 1, got {top_p}")
    if max_new_tokens < 1:
        raise ValueError(f"chat: max_new_tokens must be 1 or more, got {max_new_tokens}")
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    model, tokenizer = _loaded(Path(path), activations)
    if seed is not None:
        torch.manual_seed(seed)
    conversation = _Conversation(model, tokenizer, system, max_new_tokens, sampling)
    for prompt in _typed() if prompts is None else prompts:
        if prompt.strip() and not conversation.answer(prompt):
            break
    return conversation.speed


def _loaded(path: Path, activations: str | None) -> tuple[nn.Module, Any]:
    if not path.is_dir():
        return load_gguf(path, activations=activations or "int8")
    if activations is not None:
        raise ValueError(f"chat: activations must not be given with a folder, whose config has them, got {activations}")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="lowbit")
    fuse(model)
    return model, AutoTokenizer.from_pretrained(path)


class _Conversation:
    """Questions and answers so far, with the cache of their keys and values."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, system: str, max_new_tokens: int, sampling: dict[str, Any]
    ) -> None:
        self.model, self.tokenizer, self.max_new_tokens, self.sampling = model, tokenizer, max_new_tokens, sampling
        self.turns = [{"role": "system", "content": system}] if system else []
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.cache: Any = None
        self.cached: list[int] = []
        self.tokens, self.seconds = 0, 0.0

    @property
    def speed(self) -> str:
        return f"{self.tokens} tokens, {self.tokens / self.seconds:.1f} tokens/s" if self.tokens else "no answer"

    def answer(self, prompt: str) -> bool:
        """Stream the answer; return whether there was room for one."""
        self.turns.append({"role": "user", "content": prompt})
        inputs = self._inputs()
        ids = inputs["input_ids"][0].tolist()
        left = self.context - len(ids)
        if left < 1:
            _remark(f"the conversation has {len(ids)} tokens, the model reads {self.context}: no room for an answer")
            return False
        if ids[: len(self.cached)] != self.cached:  # a template that leaves out thoughts, or text of other tokens
            self.cache = None
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                **inputs,
                past_key_values=self.cache,
                max_new_tokens=min(self.max_new_tokens, left),
                streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
                return_dict_in_generate=True,
                **self.sampling,
            )
        self.seconds += time.perf_counter() - begin
        *self.cached, last = out.sequences[0].tolist()
        self.cache = out.past_key_values
        new = [*self.cached[len(ids) :], last]
        self.tokens += len(new)
        self.turns.append({"role": "assistant", "content": self.tokenizer.decode(new, skip_special_tokens=True)})
        if (left := left - len(new)) < _SAID_BELOW:
            _remark(f"{left} of {self.context} tokens are left for this conversation")
        return True

    def _inputs(self) -> Any:
        if self.tokenizer.chat_template:
            return self.tokenizer.apply_chat_template(
                self.turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        return self.tokenizer("\n".join(turn["content"] for turn in self.turns), return_tensors="pt")  # it continues


def _remark(text: str) -> None:
    print(f"lowbit: {text}", file=sys.stderr)


def _typed() -> Iterator[str]:
    """The lines of the standard input; in a terminal it is asked for."""
    if sys.stdin.isatty():
        while True:
            try:
                yield input("> ")
            except EOFError:
                return
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ValueError(f"chat: line {number} of the standard input must be UTF-8, got {line[:40]!r}") from None
