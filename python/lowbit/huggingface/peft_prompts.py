# SPDX-License-Identifier: Apache-2.0
"""peft: methods that train prompts, on a model with a packed embedding.

They find the embedding by the shape of its weight, which is packed bytes if it is tied to a packed head. Their setup is
wrapped once, when peft is imported (when_imported.py). While it runs, a model with a packed embedding has that
embedding under the name that peft tries first.
"""

from __future__ import annotations

import functools
from typing import Any

from peft.peft_model import PeftModel

from lowbit.quant.quant_embedding import QuantEmbedding

_NAME = "embeddings.word_embeddings"  # the name that peft tries first


def name_packed_tables() -> None:
    """Wrap the setup, unless this was done before."""
    setup = PeftModel._setup_prompt_encoder
    if hasattr(setup, "_before_lowbit"):
        return

    @functools.wraps(setup)
    def _setup_prompt_encoder(self: Any, adapter_name: str) -> None:
        base = self.base_model
        find = getattr(base, "get_input_embeddings", None)
        table = find() if callable(find) else None
        if not isinstance(table, QuantEmbedding):
            return setup(self, adapter_name)
        base.get_submodule = lambda name: table if name == _NAME else type(base).get_submodule(base, name)
        try:
            return setup(self, adapter_name)
        finally:
            del base.get_submodule

    _setup_prompt_encoder._before_lowbit = setup  # type: ignore[attr-defined]
    PeftModel._setup_prompt_encoder = _setup_prompt_encoder


name_packed_tables()
