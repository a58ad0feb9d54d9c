# SPDX-License-Identifier: Apache-2.0
"""Functions of other packages are replaced that docs/architecture.md lists, once these are imported, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

for package in ("accelerate", "bitsandbytes", "peft", "torchao", "transformers", "trl"):
    pytest.importorskip(package)
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
CODE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "tiny")!r})
from types import FunctionType
import accelerate.utils, bitsandbytes, peft, torchao.float8.float8_linear_utils, torchao.quantization, transformers.modeling_utils
import trl.trainer.utils, trl.trainer.distillation_trainer
import lowbit, lowbit.models.fused_decoder
from foreign_functions import callables_and_tables
for path, value in callables_and_tables(("accelerate", "bitsandbytes", "peft", "torch", "torchao", "transformers", "trl")):
    if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(lowbit.__path__[0]) and not value.__module__.startswith("lowbit."):
        print(value.__module__ + "." + value.__qualname__)  # which it has of the function that it wraps; others are ours, in a table
"""
REPLACED = {
    "accelerate.utils.bnb.replace_with_bnb_layers",
    "accelerate.utils.transformer_engine.convert_model",
    "peft.peft_model.PeftModel._setup_prompt_encoder",
    "peft.tuners.tuners_utils.BaseTuner.__init__",
    "peft.tuners.tuners_utils.BaseTuner._check_target_module_compatiblity",
    "peft.tuners.tuners_utils.BaseTuner.inject_adapter",
    "torchao.float8.float8_linear_utils.convert_to_float8_training",
    "transformers.cache_utils.DynamicCache.__init__",
    "transformers.cache_utils.QuantizedCache.__init__",
    "transformers.modeling_utils.PreTrainedModel.resize_token_embeddings",
    "trl.trainer.distillation_trainer.DistillationTrainer._compute_loss",
    "trl.trainer.utils.add_fused_lm_head",
}


def test_nothing_else_is_replaced(python: Callable[..., str]) -> None:
    page = PAGE.read_text()
    assert set(python(CODE).split()) == REPLACED
    assert [name for name in REPLACED if f"| `{name}` |" not in page] == []
