# SPDX-License-Identifier: Apache-2.0
"""``lowbit chat FILE.gguf``: a conversation in a terminal, the answers streamed as they are made."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import TextStreamer

from lowbit.integrations.gguf.loading import load_gguf


def chat(
    path: str, prompts: Iterable[str] | None = None, *, activations: str = "int8", max_new_tokens: int = 512
) -> str:
    """Answer each prompt on the standard output, and return how fast that was.

    Args:
        path: a GGUF file.
        prompts: the questions of one conversation, in order; None asks in the terminal until an empty line.
        activations: as of `load_gguf`.
        max_new_tokens: of each answer.

    Raises:
        FileNotFoundError, ValueError: as of `load_gguf`.
    """
    model, tokenizer = load_gguf(path, activations=activations)
    conversation: list[dict[str, str]] = []
    tokens, seconds = 0, 0.0
    for prompt in _typed() if prompts is None else prompts:
        conversation.append({"role": "user", "content": prompt})
        begin = time.perf_counter()
        answer = _answer(model, tokenizer, conversation, max_new_tokens)
        seconds += time.perf_counter() - begin
        tokens += len(answer)
        conversation.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    return f"{tokens} tokens, {tokens / seconds:.1f} tokens/s" if tokens else "no answer"


def _answer(model: nn.Module, tokenizer: Any, conversation: list[dict[str, str]], max_new_tokens: int) -> list[int]:
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:  # a model that continues text
        inputs = tokenizer("\n".join(turn["content"] for turn in conversation), return_tensors="pt")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def _typed() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line
