# SPDX-License-Identifier: Apache-2.0
"""load_gguf_adapter: a LoRA adapter of llama.cpp, from a GGUF file, as an adapter of peft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowbit.checkpoints.gguf.adapter import GgufAdapter, read_adapter
from lowbit.checkpoints.gguf.errors import errors_of
from lowbit.checkpoints.gguf.file import GgufFile
from lowbit.huggingface.hub_file import file_of

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def load_gguf_adapter(
    model: nn.Module, path: str | Path, file: str | None = None, *, adapter_name: str = "default"
) -> PeftModel:
    """Put a LoRA adapter from a GGUF file around the layers of a model. It stays beside the weights, in its own numbers.

    The first adapter makes the model a `PeftModel` and is active; further ones are added to it by their names, and
    ``set_adapter(name)`` takes one of them. A model that `lowbit.fuse` has fused stays fused with any of them.

    Args:
        model: a language model of transformers, as `load_gguf` returns it, or one with adapters already.
        path: the file, as llama.cpp's convert_lora_to_gguf.py writes it; or the name of a repository of the Hugging
            Face Hub, ``"owner/name"``.
        file: which file of a repository, as in `load_gguf`.
        adapter_name: the name of the adapter in the model.

    Returns:
        The model with the adapter.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is damaged, no LoRA adapter, or of another architecture or other sizes than the model; it
            has a key or a tensor that is not read, as of embeddings and experts; or the model has an adapter of this
            name. The message names it, and the model is unchanged.
        ConnectionError: the Hub cannot be reached.

    Example:
        >>> model, tokenizer = lowbit.load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
        >>> model = lowbit.load_gguf_adapter(model, "pirate.gguf", adapter_name="pirate")
        >>> model = lowbit.load_gguf_adapter(model, "sql.gguf", adapter_name="sql")
        >>> model.set_adapter("sql")
    """
    from peft import PeftModel, get_peft_model

    before = model.peft_config if isinstance(model, PeftModel) else {}
    if adapter_name in before:
        raise ValueError(
            f"load_gguf_adapter: adapter_name must be a new one, got {adapter_name!r} beside {', '.join(before)}"
        )
    opened = GgufFile.open(file_of("load_gguf_adapter", path, file))
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    with errors_of(opened.paths[0], "the adapter"):
        adapter = read_adapter(opened, plain)
    config, training = _config(adapter), model.training
    if isinstance(model, PeftModel):
        model.add_adapter(adapter_name, config)
    else:
        model = get_peft_model(model, config, adapter_name=adapter_name)
    _fill(plain, adapter, adapter_name)
    return model.train(training)


def _config(adapter: GgufAdapter) -> LoraConfig:
    """Return the configuration with the rank and the scaling of each layer."""
    from peft import LoraConfig

    ranks = {name: len(factors.down) for name, factors in adapter.layers.items()}
    usual = max(set(ranks.values()), key=[*ranks.values()].count)
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    more: dict[str, Any] = {} if adapter.alpha else {"alpha_pattern": others}
    return LoraConfig(
        r=usual,
        lora_alpha=adapter.alpha or usual,
        rank_pattern=others,
        target_modules=[*ranks],
        task_type="CAUSAL_LM",
        inference_mode=True,
        **more,
    )


@torch.no_grad()
def _fill(plain: nn.Module, adapter: GgufAdapter, adapter_name: str) -> None:
    """Write the factors into the layers of a new adapter."""
    for name, factors in adapter.layers.items():
        layer: Any = plain.get_submodule(name)
        layer.lora_A[adapter_name].weight.copy_(factors.down)
        layer.lora_B[adapter_name].weight.copy_(factors.up)
