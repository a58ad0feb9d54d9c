# SPDX-License-Identifier: Apache-2.0
"""Run a decoder of the Llama-3.2-1B shape (random weights) in each format: speed, bytes, peak memory.

    python examples/02_quantize_a_llama.py                # 2 of 16 layers: a minute or two
    python examples/02_quantize_a_llama.py --layers 16    # all of them, as in Meta's figures
    python examples/02_quantize_a_llama.py --layers 16 --formats bf16,w4a8

Each format runs in a process of its own, so that its peak memory is its own. The model is made layer by layer: a layer
starts in bfloat16, as in a checkpoint, and is quantized before the next one is made. So memory never holds the float
model. The embedding is tied to the output matrix, as in Llama. When that matrix is quantized, rows of the embedding are
read out of its packed form.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import lowbit
import lowbit.integrations.transformers  # registers attn_implementation="lowbit"

FORMATS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "dense-bf16": (torch.float32, lowbit.float_weight(torch.bfloat16)),
    "int8": (torch.float32, lowbit.int8_weight_only()),
    "int4": (torch.float32, lowbit.int4_weight_only(group_size=128)),
    "w8a8": (torch.float32, lowbit.int8_dynamic_activation_int8_weight()),
    "w4a8": (torch.float32, lowbit.int8_dynamic_activation_int4_weight(group_size=32)),
}
PUBLISHED = (
    "Meta's figures for its 4-bit Llama 3.2 1B and 3B against bf16 (ExecuTorch on an OnePlus 12, October 2024,\n"
    "https://ai.meta.com/blog/meta-llama-quantized-lightweight-models): "
    "decode 2.5x, prefill 4.2x, size -56 %, memory -41 %."
)


class TiedEmbedding(nn.Module):
    """Look tokens up in the packed output matrix: a token is one of the 16 columns of a panel."""

    def __init__(self, head: lowbit.QuantLinear) -> None:
        super().__init__()
        self.head = [head]  # in a list: not a submodule, so its weight is counted once

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        head, flat, rows = self.head[0], ids.flatten(), []
        for part in flat.split(32):  # 16 rows are decoded for each one wanted: a few at a time
            n, k = 16 * len(part), head.in_features
            panels = head.weight[part // 16].contiguous()
            decoded = torch.ops.lowbit.dequantize(panels, *head.spec.weight_args(n, k))
            rows.append(decoded.view(-1, 16, k)[torch.arange(len(part)), part % 16])
        return torch.cat(rows).view(*ids.shape, -1)


def build(args: argparse.Namespace, name: str) -> LlamaForCausalLM:
    """Make the model layer by layer in the format asked for."""
    dtype, format_config = FORMATS[name]
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=args.layers, num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64, vocab_size=args.vocab, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=True, rms_norm_eps=1e-5,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    head, body = model.lm_head, model.model
    head.weight = body.embed_tokens.weight
    for module in (head, *body.layers, body.norm):
        module.to_empty(device="cpu").to(torch.bfloat16)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.02)
        if format_config is not None and module is not body.norm:
            lowbit.quantize_(module, format_config)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype) if parameter.is_floating_point() else parameter.data
    if format_config is None:
        body.embed_tokens.weight = head.weight
    else:
        body.embed_tokens = TiedEmbedding(head)
        lowbit.fuse(model)  # norms, rotary embedding and MLPs as few calls
        model.set_attn_implementation("lowbit")
    return model


def peak_mb() -> float:
    """Largest resident memory of this process so far (VmHWM: exec resets it, unlike getrusage)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@torch.inference_mode()
def measure(args: argparse.Namespace, name: str) -> dict[str, float | str]:
    """Build one model, read a prompt, and decode greedily behind ``--context`` tokens; the best of ``--rounds``."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    base = peak_mb()
    model = build(args, name)
    prompt = torch.randint(0, args.vocab, (1, args.prompt))
    prefill = decode = float("inf")
    for _ in range(args.rounds):
        start = time.perf_counter()
        model(prompt, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
        prefill = min(prefill, time.perf_counter() - start)
        cache = DynamicCache(config=model.config)
        logits = model(prompt[:, : args.context], past_key_values=cache, logits_to_keep=1).logits
        start = time.perf_counter()
        for _ in range(args.decode):
            logits = model(logits[:, -1].argmax(-1, keepdim=True), past_key_values=cache, logits_to_keep=1).logits
        decode = min(decode, time.perf_counter() - start)
    if not bool(logits.isfinite().all()):
        raise RuntimeError(f"{name}: the logits are not finite")
    size = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) / 1e6
    rows = [{row.row for row in lowbit.explain(model, m=m)} or {"torch"} for m in (1, args.prompt)]
    kernels = " / ".join(", ".join(sorted(names)) for names in (rows[:1] if rows[0] == rows[1] else rows))
    return {
        "prefill": args.prompt / prefill,
        "decode": args.decode / decode,
        "mb": size,
        "peak": peak_mb(),
        "base": base,
        "kernels": kernels,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--formats", default=",".join(FORMATS), help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--prompt", type=int, default=512, help="tokens to read")
    parser.add_argument("--decode", type=int, default=32, help="tokens to write")
    parser.add_argument(
        "--context", type=int, default=1, help="tokens in the KV cache where decoding starts (llama-bench: none)"
    )
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args, args.worker)))
        return
    print(f"Llama-3.2-1B shape, {args.layers} of 16 layers, {args.threads} threads, {lowbit.info()['isa chosen']}")
    print(
        f"{args.prompt} tokens read at once; {args.decode} decoded behind {args.context}; in brackets: against bf16\n"
    )
    print(f"{'format':11}{'prefill tok/s':>20}{'decode tok/s':>20}{'weights MB':>20}{'peak RSS MB':>20}  kernels")
    bf16 = None
    names = sorted(args.formats.split(","), key=lambda name: name != "bf16")  # first: the others are compared with it
    for name in names:
        command = [sys.executable, *sys.argv, "--worker", name]
        result = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
        bf16 = result if name == "bf16" else bf16
        cells = [f"{name:11}"]
        for key in ("prefill", "decode", "mb", "peak"):
            against = ""
            if bf16 is not None and key in ("prefill", "decode"):
                against = f" ({result[key] / bf16[key]:.1f}x)"
            elif bf16 is not None:
                against = f" ({100 * (result[key] / bf16[key] - 1):+.0f} %)"
            cells.append(f"{f'{result[key]:.1f}{against}':>20}")
        print("".join(cells) + f"  {result['kernels']}", flush=True)
    print(f"\n{PUBLISHED}")
    print(f"Of each peak, {result['base']:.0f} MB are Python, torch and transformers before the model exists.")


if __name__ == "__main__":
    main()
