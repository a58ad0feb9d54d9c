# SPDX-License-Identifier: Apache-2.0
"""GGUF: load a model and its tokenizer from one llama.cpp file, keeping its codes unchanged, and write such files."""

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

from lowbit.checkpoints.gguf.saving import save

__all__ = ["save"]
