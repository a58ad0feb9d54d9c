# SPDX-License-Identifier: Apache-2.0
"""``lowbit train MODEL DATA.jsonl``: LoRA over packed weights, with TRL's SFTTrainer and peft underneath."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit.formats.text import config_of

_KINDS = (("messages",), ("text",), ("prompt", "completion"))
DEFAULT_CONFIG = "int4_weight_only(group_size=32)"


@dataclass(frozen=True)
class TrainOptions:
    """The options of `train`. Each is that of the command, whose help explains it."""

    out: str = "adapters"
    config: str | None = None
    evaluation: str | None = None
    evaluation_share: float = 0.05
    rank: int = 16
    learning_rate: float = 2e-4
    epochs: float = 1.0
    steps: int | None = None
    batch_size: int = 4
    max_length: int = 512
    save_every: int = 50
    gradient_checkpointing: bool = False
    seed: int = 0
    resume: bool = False
    merge: str | None = None
    gguf: str | None = None
    gguf_config: str | None = None
    like: str | None = None


def train(model: str, data: str, options: TrainOptions) -> str:
    """Train adapters on the records of a file, save them in ``options.out``, and return a summary.

    Args:
        model: a GGUF file, a folder that transformers' ``from_pretrained`` reads, or a name of the Hugging Face Hub.
        data: a file with one JSON object a line, all with the same fields: ``messages``, ``text``, or ``prompt`` and
            ``completion``.
        options: all else.

    Raises:
        ImportError: trl, peft or datasets is not installed.
        FileNotFoundError: a file or a checkpoint to go on from is missing.
        FileExistsError: a place to write to exists.
        ValueError: a record or an option is wrong; the message names the line, or the option.
    """
    try:
        import datasets
        import peft
        import trl
    except ImportError as error:
        raise ImportError(f"train: pip install trl peft datasets ({error})") from error
    is_file = model.endswith(".gguf")
    _check(options, model if is_file else options.like)
    records = read_records(data)
    held_out = _held_out(records, options)
    network, tokenizer = _loaded(model, is_file, options.config)
    if "messages" in records[0] and not tokenizer.chat_template:
        raise ValueError(f"train: the model must have a chat template for records with messages, {model} has none")
    arguments = _arguments(trl.SFTConfig, options, bool(held_out))
    from lowbit.huggingface.trainer_optimizer import trainer_optimizer

    trainer = trl.SFTTrainer(
        network,
        arguments,
        train_dataset=datasets.Dataset.from_list(records),
        eval_dataset=datasets.Dataset.from_list(held_out) if held_out else None,
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        optimizer_cls_and_kwargs=trainer_optimizer(arguments),
    )
    before = trainer.evaluate()["eval_loss"] if held_out else None
    seconds = trainer.train(resume_from_checkpoint=options.resume or None).metrics["train_runtime"]
    after = trainer.evaluate()["eval_loss"] if held_out else None
    trainer.save_model(options.out)
    tokenizer.save_pretrained(options.out)
    summary = _summary(trainer.state.log_history, seconds, before, after, options.out)
    if options.merge:
        trainer.model.merge_and_unload().save_pretrained(options.merge)
        tokenizer.save_pretrained(options.merge)
        summary += f"\nmerged model in {options.merge}"
    if options.gguf:
        del trainer, network
        _write_gguf(_loaded(model, is_file, options.config)[0], options, options.like or model)
        summary += f"\nmerged model in {options.gguf}"
    return summary


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Return the fields of each record that training reads, after checking all of them."""
    records: list[dict[str, Any]] = []
    kind: tuple[str, ...] = ()
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"train: line {number} of {path}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} must be a JSON object, got {line[:40].strip()!r} ({error})") from None
            fields = list(record) if isinstance(record, dict) else type(record).__name__
            found = next((kind for kind in _KINDS if isinstance(record, dict) and set(kind) <= record.keys()), None)
            if found is None:
                raise ValueError(f"{where} must have messages, or text, or prompt and completion, got {fields}")
            if kind and found != kind:
                raise ValueError(f"{where} must have {' and '.join(kind)} as the lines before it, got {fields}")
            kind = found
            for name in kind:
                _check_field(where, name, record[name])
            records.append({name: record[name] for name in kind})
    if not records:
        raise ValueError(f"train: {path} must have a record in each line, got none")
    return records


def _check_field(where: str, name: str, value: Any) -> None:
    if name != "messages":
        if not isinstance(value, str) or not value:
            raise ValueError(f"{where}: {name} must be a text, got {value!r:.40}")
        return
    turns = value if isinstance(value, list) else []
    texts = [turn.get(part) for turn in turns if isinstance(turn, dict) for part in ("role", "content")]
    if not turns or len(texts) != 2 * len(turns) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: messages must be a list of objects with role and content, got {value!r:.60}")


def _check(options: TrainOptions, like: str | None) -> None:
    for name in ("rank", "learning_rate", "epochs", "batch_size", "max_length", "save_every"):
        if not getattr(options, name) > 0:
            raise ValueError(f"train: {name} must be positive, got {getattr(options, name)}")
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"train: steps must be positive, got {options.steps}")
    if not 0 <= options.evaluation_share < 1:
        raise ValueError(f"train: evaluation_share must be 0 or more and below 1, got {options.evaluation_share}")
    for config in (options.config, options.gguf_config):
        config_of(config or DEFAULT_CONFIG)
    if options.gguf_config is not None and options.gguf is None:
        raise ValueError(f"train: gguf_config is for the file of gguf, got {options.gguf_config} without one")
    if options.gguf and like is None:
        raise ValueError("train: --gguf needs --like, a GGUF file of the same architecture, where MODEL is none")
    for name, place in (("merge", options.merge), ("gguf", options.gguf)):
        if place and Path(place).exists():
            raise FileExistsError(f"train: {name} must be new, {place} exists")
    begun = sorted(Path(options.out).glob("checkpoint-*"))
    if options.resume and not begun:
        raise FileNotFoundError(f"train: --resume goes on from the last checkpoint in {options.out}, which has none")
    if not options.resume and Path(options.out).is_dir() and any(Path(options.out).iterdir()):
        raise FileExistsError(f"train: out must be a new folder, or --resume must be given, {options.out} has files")


def _held_out(records: list[dict[str, Any]], options: TrainOptions) -> list[dict[str, Any]]:
    """Return the records to evaluate on: those of a file, or the last of ``records``, which are taken out."""
    if options.evaluation is not None:
        found = read_records(options.evaluation)
        if found[0].keys() != records[0].keys():
            raise ValueError(
                f"train: evaluation must have records with {' and '.join(records[0])}, got {' and '.join(found[0])}"
            )
        return found
    count = int(len(records) * options.evaluation_share)
    held_out = records[len(records) - count :]
    del records[len(records) - count :]
    return held_out


def _loaded(model: str, is_file: bool, config: str | None) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from lowbit.huggingface.load_gguf import load_gguf
    from lowbit.huggingface.lowbit_config import LowbitConfig
    from lowbit.models.fuse import fuse

    if is_file:
        if config is not None:
            raise ValueError(
                f"train: config must not be given with a GGUF file, whose codes are trained on, got {config}"
            )
        return load_gguf(model, activations="float")
    if not Path(model).exists() and Path(model).parent != Path() and model.count("/") != 1:
        raise FileNotFoundError(f"train: MODEL must be a file, a folder or a name of the Hub, {model} does not exist")
    packed = hasattr(AutoConfig.from_pretrained(model), "quantization_config")
    if packed and config is not None:
        raise ValueError(f"train: config must not be given with a model that is quantized already, got {config}")
    given = {} if packed else {"quantization_config": LowbitConfig(config or DEFAULT_CONFIG)}
    network = AutoModelForCausalLM.from_pretrained(model, attn_implementation="lowbit", **given)
    fuse(network)
    return network, AutoTokenizer.from_pretrained(model)


def _arguments(kind: Any, options: TrainOptions, evaluates: bool) -> Any:
    return kind(
        options.out, max_steps=options.steps or -1, num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size, per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate, lr_scheduler_type="cosine", warmup_steps=0.03, optim="adamw_8bit",
        max_length=options.max_length, packing=True, gradient_checkpointing=options.gradient_checkpointing,
        save_strategy="steps", save_steps=options.save_every, save_total_limit=1, logging_steps=10,
        eval_strategy="steps" if evaluates else "no", eval_steps=options.save_every, seed=options.seed,
        use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip


def _summary(history: list[dict[str, Any]], seconds: float, before: float | None, after: float | None, out: str) -> str:
    steps = max(entry["step"] for entry in history)
    told = [f"{steps} steps in {seconds:.0f} s"]
    if before is not None:
        told.append(f"loss of the evaluation {before:.3f}, then {after:.3f}")
    return f"{'; '.join(told)}; adapters in {out}"


def _write_gguf(network: nn.Module, options: TrainOptions, like: str) -> None:
    """Merge the saved adapters into the decoded weights, and write these, packed if a format is given. The scales that a
    merge fits to packed weights are finer than those of a GGUF file."""
    from peft import PeftModel

    from lowbit.checkpoints.gguf.saving import save
    from lowbit.huggingface.quantize_gguf import quantize_layers
    from lowbit.quant.dequantize import dequantize_

    dequantize_(network)
    merged = PeftModel.from_pretrained(network, options.out).merge_and_unload()
    if options.gguf_config is None:
        merged.to(torch.bfloat16)
    else:
        quantize_layers(merged, config_of(options.gguf_config), [])
    save(merged, options.gguf, like)
