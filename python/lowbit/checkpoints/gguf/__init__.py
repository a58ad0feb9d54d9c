# SPDX-License-Identifier: Apache-2.0
"""GGUF: a model and its tokenizer from one file of llama.cpp, its codes packed as they are."""

from __future__ import annotations

try:
    import gguf  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("gguf", "transformers"):
        raise
    raise ImportError(
        f"lowbit.load_gguf needs gguf and transformers; {error.name} is not installed: pip install gguf transformers"
    ) from error

from lowbit.integrations.gguf.loading import load_gguf, load_model
from lowbit.integrations.gguf.quantizing import quantize_to_file
from lowbit.integrations.gguf.saving import save

__all__ = ["load_gguf", "load_model", "quantize_to_file", "save"]
