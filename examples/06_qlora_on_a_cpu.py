# SPDX-License-Identifier: Apache-2.0
"""QLoRA on a CPU: a frozen quantized base, LoRA adapters of peft, 8-bit AdamW, in the Trainer of transformers.

    python examples/06_qlora_on_a_cpu.py                      # a minute or two; nothing is downloaded
    python examples/06_qlora_on_a_cpu.py --pretrain 600 --steps 200

A small byte-level Llama first learns Python's standard library and is saved: the "checkpoint" of the rest. Then it is
read in each format by from_pretrained, and adapters learn the same text in the other case (Def, CLASS), which the base
cannot know. Loss is in nats per byte, on text that is held out.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

import lowbit

FORMATS = {
    "bfloat16": None,
    "int8": "int8_weight_only()",
    "int4": "int4_weight_only(group_size=32)",
    "nf4": "nf4_weight_only(group_size=64)",
}
CONTEXT, BATCH, WIDTH = 64, 16, 128


class Pieces(Dataset):
    """Random pieces of a text, as the Trainer takes them."""

    def __init__(self, text: Tensor, count: int, seed: int) -> None:
        starts = torch.randint(len(text) - CONTEXT, (count,), generator=torch.Generator().manual_seed(seed))
        self.pieces = [text[start : start + CONTEXT].long() for start in starts.tolist()]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def library_text(swapped: bool) -> tuple[Tensor, Tensor]:
    """Return the sources of the standard library's modules, uint8: to learn, and held out."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    bytes_ = torch.frombuffer(bytearray(text.swapcase() if swapped else text), dtype=torch.uint8)
    return bytes_[: -len(bytes_) // 20], bytes_[-len(bytes_) // 20 :]


def train(model: nn.Module, text: Tensor, steps: int, lr: float, folder: str) -> float:
    """Run the Trainer with our 8-bit AdamW on the trainable parameters, and return its seconds a step."""
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, lr_scheduler_type="cosine",
        optim="adamw_8bit", optim_args="min_8bit_size=1",  # these adapters are small: 8 bits all the same
        learning_rate=lr, use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    optimizer = lowbit.trainer_optimizer(arguments)
    data = Pieces(text, steps * BATCH, seed=0)
    start = time.perf_counter()
    trainer = Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=optimizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return (time.perf_counter() - start) / steps


def loss_of(model: nn.Module, text: Tensor) -> float:
    """Return the mean cross entropy of the next byte on 64 pieces."""
    pieces = torch.stack([item["input_ids"] for item in Pieces(text, 64, seed=1)])
    with torch.no_grad():
        return model.eval()(input_ids=pieces, labels=pieces).loss.item()


def base_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for group in (model.parameters(), model.buffers()) for tensor in group)


def pretrain(folder: str, options: argparse.Namespace) -> None:
    """Make the checkpoint that the adapters begin with."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    text, held_out = library_text(swapped=False)
    seconds = train(model, text, options.pretrain, 3e-3, folder)
    print(f"pretrained: {loss_of(model, held_out):.3f} nats per byte, {1e3 * seconds:.0f} ms a step\n")
    model.to(torch.bfloat16).save_pretrained(folder)


def fine_tune(name: str, folder: str, options: argparse.Namespace) -> str:
    """Read the checkpoint in a format, train adapters on it, merge them; return the line of the table."""
    config = FORMATS[name]
    quantization = {} if config is None else {"quantization_config": lowbit.LowbitConfig(config)}
    model = AutoModelForCausalLM.from_pretrained(folder, **quantization)
    size = base_bytes(model)
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(model, lora, autocast_adapter_dtype=True)
    text, held_out = library_text(swapped=True)
    before = loss_of(model, held_out)
    seconds = train(model, text, options.steps, 1e-2, folder)
    after = loss_of(model, held_out)
    merged = model.merge_and_unload()
    layers = sum(isinstance(module, lowbit.QuantLinear) for module in merged.modules())
    losses = f"{before:10.3f}{after:10.3f}{loss_of(merged, held_out):10.3f}"
    return f"{name:10}{size / 1e6:10.2f}{losses}{layers:10}{1e3 * seconds:10.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", type=int, default=300, help="steps of the base")
    parser.add_argument("--steps", type=int, default=100, help="steps of the adapters")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--formats", default=",".join(FORMATS))
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        pretrain(folder, options)
        heads = ("base", "base MB", "before", "adapted", "merged", "packed", "step ms")
        print("".join(f"{head:10}" if i == 0 else f"{head:>10}" for i, head in enumerate(heads)))
        for name in options.formats.split(","):
            print(fine_tune(name, folder, options), flush=True)


if __name__ == "__main__":
    main()
