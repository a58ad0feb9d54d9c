# SPDX-License-Identifier: Apache-2.0
"""Refuse packed layers in transformers' ``resize_token_embeddings``, which would take the shape of the packed bytes for
that of the embedding."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from lowbit.quant.kinds import features_of, is_packed


def refuse_to_resize_packed_tables() -> None:
    """Make ``resize_token_embeddings`` raise an error, before it changes anything, if the embedding or the output head
    is packed."""
    resize = PreTrainedModel.resize_token_embeddings

    @functools.wraps(resize)
    def checked(
        self: PreTrainedModel,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        tables = [self.get_input_embeddings(), self.get_output_embeddings()]
        packed = [table for table in tables if is_packed(table)]
        same = pad_to_multiple_of is None and all(new_num_tokens in (None, features_of(table)[0]) for table in packed)
        if packed and same:
            return tables[0]
        if packed:
            names = ", ".join(name for name, module in self.named_modules() if any(module is table for table in packed))
            raise ValueError(
                f"resize_token_embeddings: the tables must be float, got {names} as {packed[0].spec.name}; resize the "
                "model before it is quantized, or leave them float (LowbitConfig(head=None), filter_fn of quantize_)"
            )
        return resize(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    PreTrainedModel.resize_token_embeddings = checked
