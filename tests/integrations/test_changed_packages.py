# SPDX-License-Identifier: Apache-2.0
"""What lowbit leaves in other packages once they are imported: what docs/architecture.md says, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

for package in ("transformers", "peft", "bitsandbytes", "torchao"):
    pytest.importorskip(package)
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
CODE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from types import FunctionType
import bitsandbytes, peft, torchao.quantization, transformers.modeling_utils
import lowbit, lowbit.integrations.fused_decoder
from foreign_functions import callables_and_tables
for name, value in callables_and_tables(("bitsandbytes", "peft", "torch", "torchao", "transformers")):
    if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(lowbit.__path__[0]) and "[" not in name:
        print(name)
"""


def test_nothing_else_is_replaced(python: Callable[..., str]) -> None:
    found, page = set(python(CODE).split()), PAGE.read_text()
    assert found == {
        "peft.tuners.lora.model.dispatch_default",
        "transformers.cache_utils.DynamicCache.__init__",
        "transformers.modeling_utils.PreTrainedModel.resize_token_embeddings",
    }
    for name in found:
        assert name.removeprefix("transformers.modeling_utils.").removeprefix("transformers.cache_utils.") in page
