# SPDX-License-Identifier: Apache-2.0
"""A language model of a GGUF file as a .pt2 of AOTInductor, for bench_llm.py.

    python benchmarks/llm_package.py model.gguf model.pt2 576

576 is the number of tokens that its static cache has room for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import lowbit
import lowbit.huggingface.registration  # noqa: F401  (attn_implementation="lowbit")
from lowbit.huggingface.load_gguf import load_model


class Decoder(TorchExportableModuleWithStaticCache):
    """Transformers' module, which returns the logits of the last token alone."""

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        for layer in self.static_cache.layers:
            layer.cumulative_length.copy_(cache_position[0])
        cache = self.static_cache
        return self.model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


def write(model: Any, path: Path, room: int) -> None:
    model.set_attn_implementation("lowbit")
    model.generation_config.cache_implementation = "static"
    length = torch.export.Dim("length", min=1, max=room)
    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "cache_position": torch.arange(3)}
    shapes = {"input_ids": {1: length}, "cache_position": {0: length}}
    with torch.no_grad():
        decoder = Decoder(model, batch_size=1, max_cache_len=room)
        program = torch.export.export(decoder, (), inputs, dynamic_shapes=shapes, strict=True)
    configs = lowbit.compile_options() | lowbit.c_shim_options()
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)


class Package:
    """The file, with the calls of a model of transformers that bench_llm.py makes."""

    def __init__(self, path: Path) -> None:
        self._run = torch._inductor.aoti_load_package(str(path))

    def __call__(self, tokens: Tensor, first: int = 0, **_: Any) -> Tensor:
        return self._run(input_ids=tokens, cache_position=torch.arange(first, first + tokens.shape[1]))

    def generate(self, tokens: Tensor, streamer: Any, max_new_tokens: int, **_: Any) -> None:
        first = 0
        for _ in range(max_new_tokens):
            length = tokens.shape[1]
            tokens = self(tokens, first).argmax(-1)
            first += length
            streamer.put(tokens)


if __name__ == "__main__":
    write(load_model(Path(sys.argv[1]), activations="int8", fuse=False), Path(sys.argv[2]), int(sys.argv[3]))
