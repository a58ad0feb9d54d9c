# SPDX-License-Identifier: Apache-2.0
"""How much of the memory's speed the answers of a GGUF file get.

    python benchmarks/bench_answer_memory.py a3b.gguf
    python benchmarks/bench_answer_memory.py llama-1b.gguf --context 2048 --rounds 5

Each token of `generate` is followed by a read of 128 MB (core/bandwidth), so that both meet the same memory: on a
shared machine its speed changes by a factor of two within a second. "of reading" is the time that the bytes of a token
take to read, as a share of the time of the token: weights without the embedding, of experts those of one token, and the
cache. A file is made by benchmarks/llama_file.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from harness import MIB, describe, header, options, table
from torch import nn

import lowbit
from lowbit import _C

READ, STREAMS = 128 * MIB, 4


def weight_bytes(model: Any) -> float:
    """The bytes of weights that a token reads."""
    embedding = model.get_input_embeddings()
    head = {id(tensor) for tensor in model.get_output_embeddings().parameters()}
    skipped = {id(tensor) for tensor in embedding.parameters()} - head
    found: dict[int, float] = {}
    for module in model.modules():
        share = share_of_experts(module, model.config)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) not in skipped:
                found[id(tensor)] = tensor.nbytes * share
    return sum(found.values())


def share_of_experts(module: nn.Module, config: Any) -> float:
    if not isinstance(module, lowbit.QuantExperts):
        return 1.0
    return config.num_experts_per_tok / max(tensor.shape[0] for tensor in module.parameters(recurse=False))


def cache_bytes(cache: Any, length: float) -> float:
    """The bytes of a cache that a token behind ``length`` others reads, and of its states also those that it writes."""
    seen = 0.0
    for layer in cache.layers:
        for name in ("keys", "values"):
            if isinstance(tensor := getattr(layer, name, None), torch.Tensor):
                seen += tensor.nbytes / tensor.shape[-2] * min(length, tensor.shape[-2])
        for name in ("conv_states", "recurrent_states"):
            if isinstance(tensor := getattr(layer, name, None), torch.Tensor):
                seen += 2 * tensor.nbytes
    return seen


class Clock:
    """A streamer that reads memory behind each token."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.begin, self.tokens, self.reads = 0.0, [], []

    def put(self, tokens: object) -> None:
        if self.begin:
            self.tokens.append(time.perf_counter() - self.begin)
        self.reads.append(READ / (1e9 * _C.read_bandwidth(READ, STREAMS, self.threads, 1)))
        self.begin = time.perf_counter()

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--context", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--activations", default="int8", choices=["int8", "float"])
    args = options(parser, rounds=5, threads=2)
    model = lowbit.load_gguf(args.file, activations=args.activations)[0]
    prompt = torch.randint(0, model.config.vocab_size, (1, args.context))
    given = dict(attention_mask=torch.ones_like(prompt), do_sample=False, eos_token_id=-1, pad_token_id=0)
    weights, lines = weight_bytes(model), []
    for _ in range(args.rounds):
        clock = Clock(args.threads)
        told = model.generate(prompt, max_new_tokens=args.tokens, streamer=clock, return_dict_in_generate=True, **given)
        tokens, reads = clock.tokens[2:], clock.reads[3:]  # the prompt, its token, and one to begin with
        size = weights + cache_bytes(told.past_key_values, args.context + args.tokens / 2)
        token, read = statistics.mean(tokens), statistics.mean(reads) / READ
        lines.append([f"{size / 1e6:.0f}", f"{token * 1e3:.1f}", f"{1 / token:.1f}", f"{1e-9 / read:.1f}",
                      f"{size * read / token:.2f}"])  # fmt: skip
    print(describe(header()))
    print(table(["MB of a token", "ms", "tokens/s", "GB/s read between", "of reading"], lines))
    print(f"mean of {args.rounds} rounds: {statistics.mean(float(line[-1]) for line in lines):.3f}")


if __name__ == "__main__":
    main()
