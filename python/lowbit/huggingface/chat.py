# SPDX-License-Identifier: Apache-2.0
"""``lowbit chat FILE.gguf``: a conversation in a terminal or over a pipe, with streamed answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from lowbit.checkpoints.gguf.special_tokens import ENDS
from lowbit.huggingface.hub_file import download, has_gguf_files, hub_files, is_repository
from lowbit.huggingface.load_gguf import load_gguf
from lowbit.models.fuse import fuse

_SAID_BELOW = 256
"""When fewer tokens than this remain in the context, a message says so."""


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
    """Answer each prompt on standard output, and return a line about the speed. Messages go to standard error.

    Args:
        path: a GGUF file, or a folder that transformers' ``from_pretrained`` reads; or the name of a repository of the
            Hugging Face Hub with either, ``"owner/name"``, which is downloaded. The argument ``file`` of `load_gguf`
            follows a colon, as in ``"owner/name:Q4_K_M"``.
        prompts: the questions of one conversation, in order; None to read lines from standard input until it ends.
        activations: the argument of `load_gguf`, for a GGUF file only; None means "int8".
        system: the system prompt, placed before the first question.
        max_new_tokens: the max number of tokens of each answer.
        temperature, top_p: the parameters of sampling; temperature 0 is greedy decoding.
        seed: the seed of sampling; None for a different one each time.

    Raises:
        FileNotFoundError, ValueError: `load_gguf` or ``from_pretrained`` raises it, a number is out of range, or a
            prompt is not UTF-8.
        ConnectionError: the Hub cannot be reached.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"chat: temperature must be 0 or more, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"chat: top_p must be above 0 and at most 1, got {top_p}")
    if max_new_tokens < 1:
        raise ValueError(f"chat: max_new_tokens must be 1 or more, got {max_new_tokens}")
    prompts = None if prompts is None else list(prompts)
    _check_text("system", system)
    for number, prompt in enumerate(prompts or (), 1):
        _check_text(f"prompt {number}", prompt)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    model, tokenizer = _loaded(path, activations)
    if seed is not None:
        torch.manual_seed(seed)
    conversation = _Conversation(model, tokenizer, system, max_new_tokens, sampling)
    for prompt in _typed() if prompts is None else prompts:
        if prompt.strip() and not conversation.answer(prompt):
            break
    return conversation.speed


def _check_text(what: str, text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # Python's stand-ins for bytes that are not UTF-8
        raise ValueError(f"chat: {what} must be UTF-8, got {text.encode('utf-8', 'surrogateescape')[:40]!r}")


def _loaded(path: str | Path, activations: str | None) -> tuple[nn.Module, Any]:
    repository, _, file = str(path).partition(":")
    if not Path(path).exists() and is_repository(repository):
        if file or has_gguf_files(hub_files("chat", repository)):
            return load_gguf(download("chat", repository, file or None), activations=activations or "int8")
        path = repository
    elif not Path(path).is_dir():
        return load_gguf(path, activations=activations or "int8")
    elif not Path(path, "config.json").exists():
        inside = ", ".join(sorted(file.name for file in Path(path).glob("*.gguf"))) or "none"
        raise FileNotFoundError(f"chat: a folder must have a config.json, {path} has none; GGUF files in it: {inside}")
    if activations is not None:
        raise ValueError(f"chat: activations must not be given with a folder, whose config has them, got {activations}")
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="lowbit")
    fuse(model)
    return model, AutoTokenizer.from_pretrained(path)


def _ends(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of ``generate`` that end an answer: not every folder names the word that ends a turn of its chat
    template as the end of a text."""
    named = model.generation_config.eos_token_id
    ends = [named] if isinstance(named, int) else list(named or ())
    ends += [tokenizer.eos_token_id, *(number for word, number in tokenizer.get_added_vocab().items() if word in ENDS)]
    ends = list(dict.fromkeys(number for number in ends if number is not None))
    return {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}


class _Conversation:
    """The questions and answers so far, with the cache of their keys and values."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, system: str, max_new_tokens: int, sampling: dict[str, Any]
    ) -> None:
        self.model, self.tokenizer, self.max_new_tokens, self.sampling = model, tokenizer, max_new_tokens, sampling
        self.turns = [{"role": "system", "content": system}] if system else []
        self.ends = _ends(model, tokenizer)
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.cache: Any = None
        self.cached: list[int] = []
        self.tokens, self.seconds = 0, 0.0

    @property
    def speed(self) -> str:
        return f"{self.tokens} tokens, {self.tokens / self.seconds:.1f} tokens/s" if self.tokens else "no answer"

    def answer(self, prompt: str) -> bool:
        """Stream the answer; return whether the context had space for one."""
        self.turns.append({"role": "user", "content": prompt})
        inputs = self._inputs()
        ids = inputs["input_ids"][0].tolist()
        left = self.context - len(ids)
        if left < 1:
            _remark(f"the conversation has {len(ids)} tokens, the model reads {self.context}: no room for an answer")
            return False
        if ids[: len(self.cached)] != self.cached:  # a template may drop thoughts, or retokenize text
            self.cache = None
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                **inputs,
                past_key_values=self.cache,
                max_new_tokens=min(self.max_new_tokens, left),
                streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
                return_dict_in_generate=True,
                **self.ends,
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
        # A base model has no chat template, and continues the text.
        return self.tokenizer("\n".join(turn["content"] for turn in self.turns), return_tensors="pt")


def _remark(text: str) -> None:
    print(f"lowbit: {text}", file=sys.stderr)


def _typed() -> Iterator[str]:
    """Yield the lines of standard input, with a prompt in a terminal."""
    if sys.stdin is None:  # closed by the parent process
        return
    if sys.stdin.isatty():
        yield from _asked_for()
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ValueError(f"chat: line {number} of the standard input must be UTF-8, got {line[:40]!r}") from None


def _asked_for() -> Iterator[str]:
    in_pipe = not sys.stdout.isatty()
    while True:
        if in_pipe:  # to which answers alone go
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = input("" if in_pipe else "> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except UnicodeDecodeError as error:
            _remark(f"a line must be UTF-8, got {error.object[:40]!r}")
            continue
        yield line
