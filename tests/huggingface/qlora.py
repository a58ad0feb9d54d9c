# SPDX-License-Identifier: Apache-2.0
"""A small QLoRA: an nf4 Llama with adapters of peft that have dropout, and texts to train it on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import torch
from tiny_models import MODELS
from torch import Tensor, nn

import lowbit

NF4 = lowbit.nf4_weight_only(group_size=64)


def adapted(config: Any = NF4, rank: int = 8, seed: int = 0) -> nn.Module:
    """The same packed base each time, with adapters of ``seed``."""
    cls, settings = MODELS["llama"]
    torch.manual_seed(0)
    model = cls(copy.deepcopy(settings))
    lowbit.quantize_(model, config)
    torch.manual_seed(seed)
    lora = peft.LoraConfig(
        r=rank, lora_alpha=16, lora_dropout=0.2, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, lora)


def data(count: int = 64) -> list[dict[str, Tensor]]:
    rows = torch.randint(97, (count, 12), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def packed(model: nn.Module) -> dict[str, Tensor]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, lowbit.QuantLinear)}
    return {name: layer.weight.detach().clone() for name, layer in layers.items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Bit for bit, through nested dicts."""
    if a.keys() != b.keys():
        return False
    return all(
        same(a[name], b[name]) if isinstance(a[name], dict)
        else torch.equal(a[name], b[name]) if isinstance(a[name], Tensor)
        else a[name] == b[name]
        for name in a
    )  # fmt: skip


def arguments(folder: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    defaults: dict[str, Any] = dict(
        max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=2,
        optim="adamw_8bit", optim_args="min_8bit_size=1", use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    return TrainingArguments(str(folder), **defaults | options)
