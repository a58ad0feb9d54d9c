# SPDX-License-Identifier: Apache-2.0
"""Short runs of TRL's trainers on small random models and made-up words."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, transformers
from torch import nn

import lowbit
from lowbit.ops.fake_quantize import fake_quantize_activations

datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

WORDS = 64  # as many as the smallest model knows


def tokenizer() -> Any:
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 3))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def rows(kind: str, count: int = 16) -> Any:
    """Texts, for SFT of very different lengths; or prompts and answers."""
    choice = random.Random(0)

    def text(length: int) -> str:
        return " ".join(f"w{choice.randrange(WORDS - 3)}" for _ in range(length))

    made: dict[str, Callable[[], dict[str, Any]]] = {
        "text": lambda: {"text": text(choice.randrange(3, 20))},
        "prompt": lambda: {"prompt": text(5)},
        "pairs": lambda: {"prompt": text(5) + " ", "chosen": text(6), "rejected": text(4)},
        "labelled": lambda: {"prompt": text(5) + " ", "completion": text(6), "label": choice.random() < 0.5},
    }
    return datasets.Dataset.from_list([made[kind]() for _ in range(count)])


def not_the_head(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != "lm_head"


def quantized(config: Any, vocab_size: int = 97, **options: Any) -> nn.Module:
    cls, settings = MODELS["llama"]
    torch.manual_seed(0)
    model = cls(type(settings)(**settings.to_dict() | {"vocab_size": vocab_size}))
    lowbit.quantize_(model, config, **options)
    return model


def with_float_head(model: nn.Module) -> nn.Module:
    """The same model, whose head is an nn.Linear with the decoded weight. If the head rounds its inputs, they are
    rounded where they come from."""
    model = copy.deepcopy(model)
    *_, group_size, _, x_format = model.lm_head.op_args
    model.lm_head = model.lm_head.to_linear().requires_grad_(False)

    def rounded(module: nn.Module, args: Any, out: Any) -> Any:
        out.last_hidden_state = fake_quantize_activations(out.last_hidden_state, x_format, group_size)
        return out

    if x_format:
        model.base_model.register_forward_hook(rounded)
    return model


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)


def settings(kind: type, folder: Path, **options: Any) -> Any:
    defaults: dict[str, Any] = dict(
        max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, bf16=False, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_steps=1, seed=3, gradient_checkpointing=False,
    )  # fmt: skip
    return kind(str(folder), **defaults | options)


def sft(
    model: nn.Module | str, folder: Path, adapters: Any = None, quantization_config: Any = None, **options: Any
) -> Any:
    given = settings(trl.SFTConfig, folder, **{"max_length": 32} | options)
    return trl.SFTTrainer(
        model, given, train_dataset=rows("text"), processing_class=tokenizer(), peft_config=adapters,
        quantization_config=quantization_config,
        optimizer_cls_and_kwargs=lowbit.trainer_optimizer(given) if given.optim == "adamw_8bit" else None,
    )  # fmt: skip


def packing(model: nn.Module, folder: Path, adapters: Any = None, **options: Any) -> Any:
    return sft(model, folder, adapters, packing=True, **options)


def dpo(
    model: nn.Module, folder: Path, adapters: Any = None, reference: nn.Module | None = None, **options: Any
) -> Any:
    given = settings(trl.DPOConfig, folder, **options)
    return trl.DPOTrainer(
        model, reference, given, train_dataset=rows("pairs"), processing_class=tokenizer(), peft_config=adapters
    )


def kto(model: nn.Module, folder: Path, adapters: Any = None, **options: Any) -> Any:
    given = settings(trl.KTOConfig, folder, **options)
    return trl.KTOTrainer(
        model, None, given, train_dataset=rows("labelled"), processing_class=tokenizer(), peft_config=adapters
    )


def _longer(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def grpo(model: nn.Module, folder: Path, adapters: Any = None, **options: Any) -> Any:
    given = settings(trl.GRPOConfig, folder, num_generations=4, max_completion_length=5, beta=0.1, **options)
    return trl.GRPOTrainer(
        model, _longer, given, train_dataset=rows("prompt"), processing_class=tokenizer(), peft_config=adapters
    )


def rloo(model: nn.Module, folder: Path, adapters: Any = None, **options: Any) -> Any:
    given = settings(trl.RLOOConfig, folder, num_generations=4, max_completion_length=5, beta=0.1, **options)
    return trl.RLOOTrainer(
        model, _longer, given, train_dataset=rows("prompt"), processing_class=tokenizer(), peft_config=adapters
    )


def distillation(model: nn.Module, folder: Path, adapters: Any = None, teacher: Any = None, beta: float = 0.5) -> Any:
    given = settings(trl.DistillationConfig, folder, max_completion_length=5, beta=beta)
    return trl.DistillationTrainer(
        model, teacher, given, train_dataset=rows("prompt"), processing_class=tokenizer(), peft_config=adapters
    )


def reward(config: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    settings_of_model = transformers.LlamaConfig(**MODELS["llama"][1].to_dict() | {"num_labels": 1, "pad_token_id": 0})
    model = transformers.LlamaForSequenceClassification(settings_of_model)
    lowbit.quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "score")
    adapters = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    return trl.RewardTrainer(
        model, settings(trl.RewardConfig, folder, max_length=32), train_dataset=rows("pairs"),
        processing_class=tokenizer(), peft_config=adapters,
    )  # fmt: skip


def losses(run: Any) -> list[float]:
    """Train, and return the loss of each step."""
    run.train()
    return [float(entry["loss"]) for entry in run.state.log_history if "loss" in entry]
