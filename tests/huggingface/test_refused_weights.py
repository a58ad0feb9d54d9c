# SPDX-License-Identifier: Apache-2.0
"""Functions of others that would take packed bytes for a float weight: they are refused by name, or fail, and never
give numbers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import lowbit
from lowbit.peers import when_imported

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
IDS = torch.arange(24).view(2, 12)


def model(**options: object) -> nn.Module:
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    lowbit.quantize_(made, lowbit.int8_weight_only(32), **options)
    return made


def only_the_head(module: nn.Module, name: str) -> bool:
    return name == "lm_head"


def test_float8_training_of_torchao_takes_float_layers_alone() -> None:
    pytest.importorskip("torchao")
    ao = pytest.importorskip("accelerate.utils.ao")
    from torchao.float8 import convert_to_float8_training

    packed = model()
    for convert in (convert_to_float8_training, ao.convert_model_to_fp8_ao):
        with pytest.raises(
            ValueError,
            match="convert_to_float8_training: the weights of linear layers must be float, got model.layers.0.* as "
            "int8 g32; module_filter_fn can leave packed layers out",
        ):
            convert(packed)
    mixed = model(filter_fn=only_the_head)
    convert_to_float8_training(mixed, module_filter_fn=lambda module, name: name.endswith("q_proj"))
    assert type(mixed.model.layers[0].self_attn.q_proj).__name__ == "Float8Linear"
    assert type(mixed.lm_head) is lowbit.QuantLinear


def test_a_program_without_packed_layers_imports_nothing_of_them(python: Callable[..., str]) -> None:
    pytest.importorskip("accelerate")
    code = """
import sys
sys.modules["transformers"] = None  # which accelerate need not have
import lowbit
from accelerate.utils import bnb
import torch
print(hasattr(bnb.replace_with_bnb_layers, "_before_lowbit"), "lowbit.quant.quant_linear" in sys.modules)
try:
    bnb.replace_with_bnb_layers(torch.nn.Sequential(torch.nn.Linear(4, 4)), None)
except AttributeError as error:
    print(error)
"""
    lines = python(code).splitlines()
    assert lines == ["True False", "'NoneType' object has no attribute 'load_in_8bit'"]


def test_layers_of_bitsandbytes_and_transformer_engine_are_made_of_float_ones() -> None:
    pytest.importorskip("accelerate")
    from accelerate.utils import transformer_engine
    from accelerate.utils.bnb import replace_with_bnb_layers
    from accelerate.utils.dataclasses import BnbQuantizationConfig

    with pytest.raises(ValueError, match="convert_model: the weights of linear layers must be float, got model.layers.0"):
        transformer_engine.convert_model(model())
    with pytest.raises(ImportError, match="transformer_engine"):  # passed through
        transformer_engine.convert_model(model(filter_fn=only_the_head), True, False)
    pytest.importorskip("bitsandbytes")
    config = BnbQuantizationConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="replace_with_bnb_layers: .* got lm_head as int8 g32; lowbit.dequantize_"):
        replace_with_bnb_layers(model(filter_fn=only_the_head), config)
    kept = replace_with_bnb_layers(model(filter_fn=only_the_head), config, modules_to_not_convert=["lm_head"])
    assert type(kept.lm_head) is lowbit.QuantLinear
    assert type(kept.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with the names of Liger, which wants a GPU to be imported; its function as transformers calls it."""
    for name, text in {
        "__init__.py": "",
        "transformers/__init__.py": "def __getattr__(name):\n    import importlib\n"
        "    return getattr(importlib.import_module('liger_kernel.transformers.monkey_patch'), name)\n",
        "transformers/monkey_patch.py": "def _apply_liger_kernel_to_instance(model, **kwargs):\n    return kwargs\n",
    }.items():
        (tmp_path / "liger_kernel" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "liger_kernel" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(when_imported, "failures", {})
    when_imported.join_when_imported()
    before = set(sys.modules)
    yield importlib.import_module("liger_kernel.transformers")
    for name in set(sys.modules) - before:
        if name.startswith(("liger_kernel", "lowbit.huggingface.liger")):
            del sys.modules[name]
    assert not when_imported.failures


def test_the_fused_loss_of_liger_is_refused_for_a_packed_head(liger: ModuleType) -> None:
    with pytest.raises(
        ValueError,
        match="_apply_liger_kernel_to_instance: the weights of linear layers must be float, got lm_head as int8 g32; "
        'give liger_kernel_config={"fused_linear_cross_entropy": False}',
    ):
        liger._apply_liger_kernel_to_instance(model=model(), rope=True)
    options = {"fused_linear_cross_entropy": False, "rope": True}
    assert liger._apply_liger_kernel_to_instance(model=model(), **options) == options
    floats = model(filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    assert liger._apply_liger_kernel_to_instance(floats, rope=False) == {"rope": False}


def test_what_transformers_and_torch_make_of_a_packed_head_never_gives_numbers() -> None:
    """The head of an assistant is cut to the words that both models have (assisted generation with other tokenizers)."""
    from transformers.generation.candidate_generator import _PruneReindexingLMHead

    packed, hidden = model(), torch.randn(3, 64)
    with pytest.raises(IndexError, match="out of range"):
        _PruneReindexingLMHead(packed.lm_head, torch.tensor([1, 90]))
    with pytest.raises(TypeError, match="only accepts floating point"):
        _PruneReindexingLMHead(packed.lm_head, torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        nn.functional.linear(hidden, packed.lm_head.weight)
    with pytest.raises(ValueError, match="resize_token_embeddings: the tables must be float, got lm_head as int8 g32"):
        packed.resize_token_embeddings(120)
    with pytest.raises(ValueError, match="has a packed weight, which has no gradient"):
        packed.lm_head.requires_grad_(True)
