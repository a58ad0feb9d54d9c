# SPDX-License-Identifier: Apache-2.0
"""The command line, `lowbit` or `python -m lowbit`.

`lowbit info` (machine, ops, threads, fallbacks), `lowbit kernels [op]`, `lowbit prebuild --arch sm_90a`, `lowbit
quantize MODEL OUT`, `lowbit chat FILE.gguf`, `lowbit train MODEL DATA.jsonl`, `lowbit compare A B`, `lowbit recorder
DIR`, `lowbit cmake-dir`, `lowbit --version`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import lowbit
from lowbit.documents.whole_file import replaced_file


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    if others and options.command == "chat" and not any(word.startswith("-") for word in others):
        options.prompt += others  # argparse does not assign prompts that follow an option
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        print(options.run(options), file=sys.stderr if options.command == "chat" else sys.stdout, flush=True)
    except BrokenPipeError:  # a pipe such as head has closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would flush at exit and fail
        return 141
    except (
        ImportError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # no torch, an unknown op, an invalid LOWBIT_ISA, no file
        print(f"lowbit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        goes_on = {"quantize": "; the same command goes on where it was", "train": "; --resume goes on"}.get(
            options.command, ""
        )
        print(f"lowbit: interrupted{goes_on}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowbit", description="What this build of lowbit runs on this machine.")
    parser.add_argument("--version", action="version", version=f"lowbit {lowbit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="version, ISA levels, threads, torch, registered ops, fallbacks and their reasons"
    )
    info.set_defaults(run=lambda options: lowbit.info())
    kernels = commands.add_parser("kernels", help="the kernel rows of an op, best first")
    kernels.add_argument("op", nargs="?", default="linear")
    kernels.set_defaults(run=lambda options: lowbit.kernels(options.op))
    prebuild = commands.add_parser(
        "prebuild",
        help="compile the CUDA kernels that are used most into the cache; needs NVRTC, no GPU",
        description="For machines without a compiler, and LOWBIT_JIT=0. Cache: LOWBIT_CACHE_DIR or ~/.cache/lowbit.",
    )
    prebuild.add_argument("--arch", required=True, help="architectures, such as sm_80,sm_90a")
    prebuild.set_defaults(run=_prebuild)
    quantize = commands.add_parser(
        "quantize",
        help="pack the linear layers of a checkpoint of transformers, one tensor in memory at a time",
        description="Write a folder that from_pretrained and lowbit.load read, where an interrupted run goes on; or, "
        "where OUT ends in .gguf, a file that llama.cpp reads, for which the whole model is in memory. A folder that another "
        "package quantized (GPTQ, AWQ and so on) needs no format: its codes are packed as they are.",
    )
    quantize.add_argument("model", help="folder with config.json and safetensors files, or a .gguf file")
    quantize.add_argument("out", help="folder to make, or .gguf file")
    quantize.add_argument("--config", help='format of the layers, such as "int4_weight_only(group_size=32)"')
    quantize.add_argument("--plan", help="JSON file with the formats of single layers, as autoquant saves it")
    quantize.add_argument("--embeddings", metavar="FORMAT", help="format of the embeddings; default: they stay float")
    told = 'format of the output head; default: as --config, or 8 bits where that has fewer; "None": as any other layer'
    quantize.add_argument("--head", metavar="FORMAT", default="int8", help=told)
    told = "layers that stay float: their names, beginnings (model.layers.1) or ends (up_proj) of names, or patterns"
    quantize.add_argument("--modules-to-not-convert", nargs="+", metavar="NAME", help=told)
    told = (
        '"self": the model writes its own text, and GPTQ chooses the codes; or a text file, which weights the errors of '
        "a search, or serves GPTQ where --config names it; the float model is then in memory, or, with self, one layer "
        "of it if it does not fit"
    )
    quantize.add_argument("--calibration", metavar="self|FILE.txt", help=told)
    told = "of a folder that another package quantized: inputs of layers with integers; default: as its method does"
    quantize.add_argument("--activations", choices=("int8", "float"), help=told)
    quantize.add_argument("--like", metavar="FILE", help=".gguf file whose metadata a .gguf OUT takes; default: MODEL")
    quantize.set_defaults(run=_quantize)
    chat = commands.add_parser(
        "chat",
        help="talk to the language model of a GGUF file, and see how many tokens a second it makes",
        description="Answers go to the standard output, everything else to the standard error. Ctrl-D ends it.",
    )
    told = (
        "a .gguf file, a folder of a model of transformers, or the name of a repository of the Hugging Face Hub with "
        "either, which is downloaded: owner/name, or owner/name:Q4_K_M where it has several files"
    )
    chat.add_argument("file", help=told)
    chat.add_argument("prompt", nargs="*", help="the prompts, in order; default: lines of the standard input")
    chat.add_argument("--activations", choices=("int8", "float"), help="of linear layers of a file; default: int8")
    chat.add_argument("--system", metavar="TEXT", default="", help="what the model is told before the first prompt")
    chat.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of each answer")
    chat.add_argument("--temperature", type=float, default=0.8, metavar="T", help="of sampling; default: 0.8")
    chat.add_argument("--top-p", type=float, default=0.95, metavar="P", help="of sampling; default: 0.95")
    chat.add_argument("--seed", type=int, metavar="N", help="of sampling; default: another one each time")
    chat.add_argument("--greedy", action="store_true", help="the likeliest word always, as --temperature 0")
    chat.set_defaults(run=_chat)
    _add_train(commands)
    compare = commands.add_parser("compare", help="the error of each weight of one checkpoint against another, in dB")
    compare.add_argument("a", help="folder or safetensors file that counts as exact")
    compare.add_argument("b", help="folder or safetensors file that is measured against it")
    compare.add_argument("--picture", metavar="PNG", help="draw the errors into this file")
    compare.set_defaults(run=_compare)
    recorder = commands.add_parser(
        "recorder",
        help="report of a folder's flight recorders: where each rank is, where they first differ, which to blame",
        description="Reads rings of processes that live or are gone, dumps, and dumps of torch's flight recorder. A "
        "process records if LOWBIT_RECORD=1 is in its environment.",
    )
    recorder.add_argument("folder", nargs="?", help="default: where this user's recorders write")
    recorder.add_argument("--json", metavar="FILE", help="write the same as JSON")
    recorder.add_argument("--trace", metavar="FILE", help="write the timeline as a trace for ui.perfetto.dev")
    recorder.set_defaults(run=_recorder)
    cmake = commands.add_parser(
        "cmake-dir",
        help="the folder for -Dlowbit_DIR=, with which C programs find liblowbit and its header",
        description="find_package(lowbit CONFIG REQUIRED) then has the target lowbit::lowbit; docs/c_api.md.",
    )
    cmake.set_defaults(run=lambda options: Path(lowbit.__file__).with_name("cmake"))
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train LoRA adapters over packed weights, on a file of records",
        description="Adapters go to --out, with a checkpoint every --save-every steps. Records are packed into rows of "
        "--max-length tokens, and do not see each other. Needs trl, peft and datasets.",
    )
    train.add_argument("model", help="a .gguf file, a folder of a model of transformers, or a name of the Hub")
    told = "one JSON object a line, with messages, or text, or prompt and completion, whose completion is trained"
    train.add_argument("data", metavar="DATA.jsonl", help=told)
    train.add_argument("--out", default="adapters", metavar="FOLDER", help="default: adapters")
    told = 'format of the weights of a float model; default: "int4_weight_only(group_size=32)"'
    train.add_argument("--config", metavar="FORMAT", help=told)
    train.add_argument("--evaluation", metavar="FILE.jsonl", help="records to evaluate on; default: a share of DATA")
    told = "the share of DATA that is held out, its last records; default: 0.05"
    train.add_argument("--evaluation-share", type=float, default=0.05, metavar="S", help=told)
    train.add_argument("--rank", type=int, default=16, metavar="R", help="of the adapters, whose alpha is 2 R")
    train.add_argument("--learning-rate", type=float, default=2e-4, metavar="LR", help="default: 2e-4")
    train.add_argument("--epochs", type=float, default=1.0, metavar="N", help="default: 1")
    train.add_argument("--steps", type=int, metavar="N", help="in place of epochs")
    train.add_argument("--batch-size", type=int, default=4, metavar="N", help="rows of a step; default: 4")
    told = "tokens of a row; longer records are cut; default: 512"
    train.add_argument("--max-length", type=int, default=512, metavar="N", help=told)
    train.add_argument(
        "--save-every", type=int, default=50, metavar="N", help="steps of a checkpoint and an evaluation"
    )
    told = "compute activations again in the backward, for less memory"
    train.add_argument("--gradient-checkpointing", action="store_true", help=told)
    train.add_argument("--seed", type=int, default=0, metavar="N")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    train.add_argument("--merge", metavar="FOLDER", help="merge the adapters, and save the model here")
    train.add_argument("--gguf", metavar="FILE", help="merge the adapters, and write a file that llama.cpp reads")
    told = 'format of the weights of --gguf, such as "int4_weight_only(group_size=32)"; default: bfloat16'
    train.add_argument("--gguf-config", metavar="FORMAT", help=told)
    train.add_argument("--like", metavar="FILE", help=".gguf file whose metadata --gguf takes; default: MODEL")
    train.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> object:
    from lowbit.huggingface.train import TrainOptions, train

    given = {field: getattr(options, field) for field in TrainOptions.__dataclass_fields__}
    return train(options.model, options.data, TrainOptions(**given))


def _recorder(options: argparse.Namespace) -> object:
    from lowbit.recorder.report import report  # works without torch

    return report(options.folder, json_file=options.json, trace_file=options.trace)


def _quantize(options: argparse.Namespace) -> object:
    head = None if options.head == "None" else options.head
    calibration = options.calibration
    if calibration not in (None, "self"):
        calibration = [Path(calibration).read_text()]
    if options.out.endswith(".gguf"):
        from lowbit.huggingface.quantize_gguf import quantize_to_file

        if options.config is None or options.plan or options.embeddings or options.activations:
            raise ValueError(
                "quantize: a .gguf OUT must have --config, and none of --plan, --embeddings and --activations"
            )
        if calibration not in (None, "self"):
            raise ValueError(f"quantize: --calibration of a .gguf OUT must be self, got {options.calibration}")
        return quantize_to_file(
            options.model, options.out, options.config, like=options.like,
            modules_to_not_convert=options.modules_to_not_convert, head=head, calibration=calibration,
        )  # fmt: skip
    if options.model.endswith(".gguf") or options.like:
        raise ValueError("quantize: a .gguf MODEL and --like are for a .gguf OUT")
    return lowbit.quantize_checkpoint(
        options.model,
        options.out,
        options.config,
        plan=options.plan,
        modules_to_not_convert=options.modules_to_not_convert,
        embeddings=options.embeddings,
        head=head,
        calibration=calibration,
        activations=options.activations,
    )


def _chat(options: argparse.Namespace) -> object:
    from lowbit.huggingface.chat import chat

    return chat(
        options.file,
        options.prompt or None,
        activations=options.activations,
        system=options.system,
        max_new_tokens=options.max_new_tokens,
        temperature=0.0 if options.greedy else options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )


def _prebuild(options: argparse.Namespace) -> object:
    made = lowbit.devices.prebuild(*options.arch.split(","))
    return "\n".join(f"{path}: {name}" for path, name in made.items())


def _compare(options: argparse.Namespace) -> object:
    comparison = lowbit.compare_checkpoints(options.a, options.b)
    if options.picture:
        with replaced_file(options.picture) as place:
            comparison.plot().figure.savefig(place, dpi=120)
    return comparison


if __name__ == "__main__":
    raise SystemExit(main())
