# SPDX-License-Identifier: Apache-2.0
"""Write docs/api.md from the docstrings of the public names: `python tools/api_page.py`; `--check` only says whether
the page is current."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# API

Every public name, from its docstring. This page is made by `python tools/api_page.py`; edit the docstrings. A score
or mask function (a mod) is explained in [flex_attention](ops/flex_attention.md), the formats in [choose a
format](choose_a_format.md).
"""
SECTIONS = {
    "Quantizing models": "lowbit: quantize_ sparsify_ calibrate Calibration rotate_ smooth_ dequantize_ load fuse "
    "fuse_loss fuse_gated_mlps QuantLinear QuantEmbedding QuantExperts BlockSparseLinear QuantizationReport merging MergeReport "
    "linear gather_linear experts linear_cross_entropy linear_kl_div route sample gated_delta_rule ssd selective_scan causal_conv1d gated_rms_norm",
    "Choosing formats by measuring": "lowbit: autoquant Plan",
    "Choosing formats by measuring: what manual=True returns": "lowbit.autotune: Recording",
    "Configurations": "lowbit: int8_dynamic_activation_int4_weight int8_dynamic_activation_int8_weight "
    "int4_weight_only nf4_weight_only fp4_weight_only int8_weight_only intx_weight_only "
    "semi_sparse_weight int8_dynamic_activation_int8_semi_sparse_weight block_sparse_weight "
    "int8_dynamic_activation_intx_weight float8_weight_only "
    "float8_dynamic_activation_float8_weight float_weight "
    "Int8DynamicActivationInt4WeightConfig Int8DynamicActivationInt8WeightConfig Int4WeightOnlyConfig "
    "NF4WeightOnlyConfig FP4WeightOnlyConfig Int8WeightOnlyConfig IntxWeightOnlyConfig "
    "SemiSparseWeightConfig Int8DynamicActivationInt8SemiSparseWeightConfig BlockSparseWeightConfig "
    "Int8DynamicActivationIntxWeightConfig Float8WeightOnlyConfig "
    "Float8DynamicActivationFloat8WeightConfig FloatWeightConfig GPTQ HQQ MappingType PerRow PerGroup PerAxis PerToken",
    "How a weight is stored": "lowbit.formats: LinearSpec StoredWeight",
    "What reports and calibrations hold, and other layouts": "lowbit.quant: ReportRow FloatWeight InputMoments repack",
    "Training": "lowbit.training: QATConfig Int8MixedPrecisionTrainingConfig Int8WeightOnlyQuantizedTrainingConfig "
    "BitNetTrainingConfig distillation_loss",
    "Training with 2:4 sparsity": "lowbit.training: swap_linear_with_semi_sparse_linear "
    "swap_semi_sparse_linear_with_linear SemiSparseLinear SemiSparseActivationLinear",
    "Training in float8": "lowbit.training: convert_to_float8_training end_float8_training Float8LinearConfig "
    "CastConfig Float8GemmConfig ScalingType ScalingGranularity Float8LinearRecipeName",
    "Attention": "lowbit: scaled_dot_product_attention flex_attention AuxRequest AuxOutput create_block_mask "
    "create_mask and_masks "
    "or_masks noop_mask BlockMask QuantizedKVCache",
    "Attention: a layer of the quantized cache": "lowbit.attention.kv_layer: QuantizedKVLayer",
    "Attention: install, pictures": "lowbit.attention: install uninstall installed plot",
    "Attention: ready-made masks": "lowbit.attention.masks: *",
    "Attention: ready-made score functions": "lowbit.attention.mods: *",
    "torch.compile": "lowbit: compile_options compile_blocks c_shim_options",
    "Optimizers": "lowbit.optim: *",
    "Checkpoints of transformers": "lowbit: LowbitConfig load_gguf load_gguf_adapter quantize_checkpoint save compare_checkpoints Comparison",
    "transformers": "lowbit: QuantizedCache croppable_cache rewind_cache save_cache load_cache",
    "transformers: optimizers of the Trainer": "lowbit: trainer_optimizer",
    "Weights of bitsandbytes": "lowbit.peers.bitsandbytes: from_bitsandbytes to_bitsandbytes replace_linear4bit "
    "layer_of_blocks",
    "Weights of torchao": "lowbit.peers.torchao: from_torchao",
    "MXFP4 and NVFP4": "lowbit.checkpoints.microscaling: from_mxfp4 from_nvfp4",
    "ONNX": "lowbit.export.onnx: export",
    "ExecuTorch": "lowbit.export.executorch: export",
    "What runs here": "lowbit: info kernels explain force_kernel profile warmup",
    "The flight recorder": "lowbit.recorder: start records dump watch record_collectives path report Record Recording",
    "Devices": "lowbit.devices: list check has_kernels",
    "Kernels of other packages": "lowbit.backends: report Report include_dir Api",
    "Kernels of other packages: their tests": "lowbit.testing: backend_suite",
}
_PART = re.compile(r"^(Args|Raises|Example|Returns):\n((?:(?:    .*)?\n)*)", re.MULTILINE)


def page() -> str:
    """Return the text of docs/api.md."""
    parts = [HEAD]
    for title, names in SECTIONS.items():
        module_name, _, wanted = names.partition(": ")
        module = importlib.import_module(module_name)
        parts.append(f"## {title}\n")
        parts += [
            entry(f"{module_name}.{name}", getattr(module, name))
            for name in (module.__all__ if wanted == "*" else wanted.split())
        ]
    return "\n".join(parts)


def entry(name: str, value: Any) -> str:
    """Return the part of one name: its signature, its docstring, and the public methods of a class."""
    if getattr(value, "__module__", "").startswith("torch."):
        return f"### {name}\n\ntorch's own `{value.__module__}.{value.__qualname__}`.\n"
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"### {name}\n\n{markdown(inspect.cleandoc(type(value).__doc__ or ''))}"
    if inspect.isclass(value) and value.__name__ != name.rpartition(".")[2]:
        return f"### {name}\n\nThe short name of `{value.__name__}`.\n"
    is_enum = inspect.isclass(value) and issubclass(value, enum.Enum)
    call = "" if is_enum else f"```python\n{signature(name.rpartition('.')[2], value)}\n```\n"
    lines = [f"### {name}\n", call, markdown(docstring(value))]
    if is_enum:
        lines.append("Values: " + ", ".join(f"`{member.name}`" for member in value) + ".\n")
    elif inspect.isclass(value):
        own = {member: getattr(value, member) for member in vars(value) if not member.startswith("_")}
        # torch puts a wrapped `step` into the class of an optimizer as soon as there is one
        methods = [method(member, made) for member, made in own.items() if not getattr(made, "hooked", False)]
        lines.append("".join(line + "\n" for line in methods if line))
    return "\n".join(line for line in lines if line)


def method(name: str, value: Any) -> str:
    """Return the item of a documented method or property in a list, or nothing."""
    if not (inspect.isroutine(value) or isinstance(value, property)) or not value.__doc__:
        return ""
    shown = name if isinstance(value, property) else signature(name, value)
    text = inspect.cleandoc(value.__doc__) + "\n"
    told = re.sub(r"\s+", " ", _PART.sub("", text)).strip()
    parts = {match[1]: items(match[2]) for match in _PART.finditer(text)}
    below = [f"  - {item}" for item in parts.get("Args", [])]
    below += [f"  - returns {item[0].lower()}{item[1:]}" for item in parts.get("Returns", [])]
    below += [f"  - raises {item}" for item in parts.get("Raises", [])]
    return "\n".join([f"- `{shown}`: {told}", *below]).replace("``", "`")


def docstring(value: Any) -> str:
    """Return the docstring; of a class without Args also those of the base that has them."""
    own = (
        inspect.cleandoc(vars(value).get("__doc__") or "")
        if inspect.isclass(value)
        else inspect.cleandoc(value.__doc__ or "")
    )
    if not inspect.isclass(value) or "Args:" in own:
        return own
    inherited = (
        inspect.cleandoc(vars(base).get("__doc__") or "")
        for base in value.__mro__[1:]
        if base.__module__.startswith("lowbit.")
    )
    return "\n\n".join([own, *[text[text.index("Args:") :] for text in inherited if "Args:" in text][:1]])


def signature(name: str, value: Any) -> str:
    """Return the call as it is written in Python, on one line where that has at most 110 columns."""
    try:
        found = inspect.signature(value)
    except ValueError:
        return f"{name}(...)"
    shown, kind = [], None
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            shown.append("*")
        kind = parameter.kind
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        default = "" if parameter.default is parameter.empty else f"={literal(parameter.default)}"
        shown.append(f"{star}{parameter.name}{default}")
    line = f"{name}({', '.join(shown)})"
    return (
        line
        if len(line) <= 110
        else f"{name}(\n{textwrap.fill(', '.join(shown), 106, initial_indent='    ', subsequent_indent='    ')}\n)"
    )


def literal(value: Any) -> str:
    """Return a default as a reader would write it."""
    if isinstance(value, enum.Enum):
        return str(value)
    if inspect.isroutine(value):
        return value.__name__
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value) if value.__class__.__repr__ is not object.__repr__ else "..."


def markdown(text: str) -> str:
    """Return a docstring as Markdown: Args and Raises as lists, Example as code."""

    def part(match: re.Match[str]) -> str:
        body = textwrap.dedent(match[2]).strip("\n")
        if match[1] == "Example":
            return f"\n```python\n{body}\n```\n"
        if match[1] == "Returns":
            return "\nReturns: " + re.sub(r"\s+", " ", body) + "\n"
        return f"\n{match[1]}:\n\n" + "\n".join(f"- {item}" for item in items(match[2])) + "\n"

    return re.sub(r"\n{3,}", "\n\n", _PART.sub(part, text.replace("``", "`").rstrip() + "\n"))


def items(text: str) -> list[str]:
    """Return the entries of Args or Raises, each on one line, its names as code."""
    found = re.split(r"\n(?=\S)", textwrap.dedent(text).strip("\n"))
    return [re.sub(r"^([\w ,*.]+):", r"`\1`:", re.sub(r"\s+", " ", item)) for item in found]


def main() -> int:
    made = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text() == made
        print("current" if current else "docs/api.md is not current: python tools/api_page.py")
        return 0 if current else 1
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
