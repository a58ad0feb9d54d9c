# SPDX-License-Identifier: Apache-2.0
"""Speech to text by the shapes of Whisper with random weights: lowbit, float torch, and faster-whisper (CTranslate2).

    python benchmarks/bench_whisper.py --peer-python ~/peers/bin/python
    python benchmarks/bench_whisper.py --only "lowbit W8A8; faster-whisper int8" --models base --tokens 50

Each candidate gets the same features of 30 s, and answers with --tokens tokens, greedy, the end of the text suppressed,
in a process of its own; the best round counts. ``encoder`` is the time of the encoder, ``token`` that of one token of
the answer. ``cosine`` is that of the encoder's result and that of float. --peer-python names the interpreter of an
environment with faster-whisper, torch and transformers. Its candidate is called through ctranslate2, as faster-whisper
calls it, because random weights have no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LOWBIT = ("lowbit W8A8", "lowbit W8A8, a scale per output", "lowbit W4A8")
PEERS = {"faster-whisper int8": "int8", "faster-whisper float": "float32"}
"""The candidates of CTranslate2, with their compute types."""
CANDIDATES = ("float", *LOWBIT, *PEERS)
MODELS = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12)}
"""Columns, layers of encoder and decoder, heads."""
START, END = 50258, 50257
"""The first token of an answer, and the end of the text."""


def config_of(model: str) -> Any:
    import transformers

    columns, layers, heads = MODELS[model]
    return transformers.WhisperConfig(
        d_model=columns, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * columns, decoder_ffn_dim=4 * columns,
        decoder_start_token_id=START, eos_token_id=END, pad_token_id=END, bos_token_id=END,
    )  # fmt: skip


def model_of(name: str, attention: str) -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration._from_config(
        config_of(name), attn_implementation=attention
    ).eval()
    settings = model.generation_config
    settings.suppress_tokens, settings.begin_suppress_tokens = [END], None
    settings.decoder_start_token_id, settings.eos_token_id, settings.pad_token_id = START, END, END
    settings.max_length = model.config.max_target_positions
    return model


def features() -> torch.Tensor:
    return torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(1))


# ---- one candidate, in a process of its own -------------------------------------------------------------------------


def of_transformers(candidate: str, name: str, tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the encoder, and all from features to tokens."""
    import lowbit  # before transformers makes a model with its attention

    model, x = model_of(name, "sdpa" if candidate == "float" else "lowbit"), features()
    if candidate != "float":
        group = None if "scale" in candidate else 32
        bits = (
            lowbit.int8_dynamic_activation_int4_weight
            if "W4" in candidate
            else lowbit.int8_dynamic_activation_int8_weight
        )
        lowbit.quantize_(model, bits(group_size=group))
        lowbit.fuse(model)

    @torch.no_grad()
    def encode() -> torch.Tensor:
        return model.model.encoder(x).last_hidden_state

    def answer() -> int:
        return model.generate(x, max_new_tokens=tokens).shape[-1]

    return encode, answer


def of_ctranslate2(candidate: str, name: str, tokens: int, root: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import ctranslate2
    import numpy as np
    from ctranslate2.converters.transformers import WhisperLoader

    folder = root / name
    if not folder.exists():
        folder.mkdir(parents=True)
        spec = WhisperLoader().get_model_spec(model_of(name, "sdpa"))
        special = {
            END: "<|endoftext|>",
            START: "<|startoftranscript|>",
            50362: "<|nospeech|>",
            50363: "<|notimestamps|>",
        }
        spec.register_vocabulary([special.get(i, f"t{i}") for i in range(spec.get_vocabulary_size())])
        spec.validate()
        spec.optimize(quantization=None)
        spec.save(str(folder))
    threads = torch.get_num_threads()
    model = ctranslate2.models.Whisper(
        str(folder), device="cpu", compute_type=PEERS[candidate], intra_threads=threads, inter_threads=1
    )
    x = ctranslate2.StorageView.from_array(features().numpy())

    def encode() -> torch.Tensor:
        return torch.from_numpy(np.array(model.encode(x)))

    def answer() -> int:
        # CTranslate2 answers with half of max_length at the most.
        (result,) = model.generate(
            model.encode(x), [[START]], beam_size=1, max_length=2 * tokens, suppress_blank=False, suppress_tokens=[END]
        )
        return len(result.sequences_ids[0])

    return encode, answer


def best(call: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):  # the first one does not count
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def measured(given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(given.threads)
    if given.candidate in PEERS:
        encode, answer = of_ctranslate2(given.candidate, given.model, given.tokens, given.root)
    else:
        encode, answer = of_transformers(given.candidate, given.model, given.tokens)
    encoded, count = encode().flatten()[:: 1 if given.model == "tiny" else 7], answer()
    if not given.tokens <= count <= given.tokens + 1:  # transformers returns the first token too
        raise RuntimeError(f"{given.candidate} must answer with {given.tokens} tokens, got {count}")
    encoder, whole = best(encode, given.rounds), best(answer, given.rounds)
    return {"encoder": encoder, "whole": whole, "encoded": encoded.tolist()}


# ---- all of them ----------------------------------------------------------------------------------------------------


def run(candidate: str, model: str, root: Path, given: argparse.Namespace) -> dict[str, Any]:
    python = given.peer_python if candidate in PEERS else sys.executable
    command = [str(python), __file__, "--candidate", candidate, "--model", model, "--root", str(root)]
    command += [f"--{name}={getattr(given, name)}" for name in ("threads", "rounds", "tokens")]
    environment = os.environ | {"OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def told(found: dict[str, Any], reference: dict[str, Any] | None, tokens: int) -> list[str]:
    seconds = [found["encoder"], (found["whole"] - found["encoder"]) / tokens, found["whole"]]
    cells = [f"{1e3 * each:.2f}" for each in seconds]
    if reference is None:
        return [*cells, ""]
    pair = torch.tensor(found["encoded"]), torch.tensor(reference["encoded"])
    return [*cells, f"{float(torch.nn.functional.cosine_similarity(*pair, dim=0)):.5f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="; ".join(CANDIDATES), help="candidates, divided by semicolons")
    parser.add_argument("--models", default="base,small")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--root", type=Path, help="a folder that keeps the models of CTranslate2")
    parser.add_argument("--candidate", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.candidate:
        print(json.dumps(measured(given)))
        return
    from harness import describe, header, table

    print(describe(header()))
    for model in given.models.split(","):
        rows, reference = [], None
        with tempfile.TemporaryDirectory() as root:
            for candidate in sorted(map(str.strip, given.only.split(";")), key="float".__ne__):  # float first
                found = run(candidate, model, given.root or Path(root), given)
                if "failed" in found:
                    rows.append([candidate, f"failed: {found['failed']}", "", "", ""])
                    continue
                reference = found if candidate == "float" else reference
                rows.append([candidate, *told(found, reference, given.tokens)])
        print(f"\n{table([model, 'encoder, ms', 'token, ms', 'whole, ms', 'cosine'], rows)}", flush=True)


if __name__ == "__main__":
    main()
