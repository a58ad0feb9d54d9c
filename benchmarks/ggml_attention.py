# SPDX-License-Identifier: Apache-2.0
"""Decoding by llama.cpp's `ggml_flash_attn_ext`, driven as ggml_linear.py drives its products: caches of f16, q8_0 and
q4_0 in torch's memory, queries and results in float32, no mask, threads as torch has them."""

from __future__ import annotations

import weakref

import torch
from ggml_linear import F32, Library
from torch import Tensor

CACHES = {"f16": 1, "q8_0": 8, "q4_0": 2}  # ggml_type of each


class GgmlAttention:
    """q [1, Hq, 1, D] over keys and values -> [1, Hq, 1, D], float32; the next call overwrites it.

    Args:
        library: whose attention it is.
        cache: one of `CACHES`.
        q: float32 [1, Hq, 1, D].
        keys_values: float32 [2, 1, Hkv, S, D].
        token_major: rows of a token lie side by side, as [S, Hkv, D].
    """

    def __init__(self, library: Library, cache: str, q: Tensor, keys_values: Tensor, *, token_major: bool) -> None:
        self.library, self.q = library, q.contiguous()
        api, context = library.api, library.context
        _, _, heads, length, head_dim = keys_values.shape
        stored = []
        self.memory: list[Tensor] = []
        for rows in keys_values[:, 0]:
            rows = (rows.transpose(0, 1) if token_major else rows).reshape(-1, head_dim)
            packed = rows.half() if cache == "f16" else library.pack(cache, rows)
            shape = (heads, length) if token_major else (length, heads)
            tensor = api.ggml_new_tensor_4d(context, CACHES[cache], head_dim, *shape, 1)
            self._place(tensor, packed)
            stored.append(api.ggml_permute(context, tensor, 0, 2, 1, 3) if token_major else tensor)
        query = api.ggml_new_tensor_4d(context, F32, head_dim, 1, self.q.shape[1], 1)
        self._place(query, self.q)
        result = api.ggml_flash_attn_ext(context, query, *stored, None, head_dim**-0.5, 0.0, 0.0)
        self.out = torch.empty(1, self.q.shape[1], 1, head_dim)
        self._place(result, self.out)
        self.graph = api.ggml_new_graph_custom(context, 8, False)
        api.ggml_build_forward_expand(self.graph, result)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(memory.nbytes for memory in self.memory[:2])

    def __call__(self) -> Tensor:
        api, backend = self.library.api, self.library.backend
        api.ggml_backend_cpu_set_n_threads(backend, torch.get_num_threads())
        if status := api.ggml_backend_graph_compute(backend, self.graph):
            raise RuntimeError(f"ggml_backend_graph_compute of {self.library.name} returned {status}")
        return self.out

    def _place(self, tensor: int, memory: Tensor) -> None:
        api = self.library.api
        buffer = api.ggml_backend_cpu_buffer_from_ptr(memory.data_ptr(), memory.nbytes)
        weakref.finalize(self, api.ggml_backend_buffer_free, buffer)
        api.ggml_backend_tensor_alloc(buffer, tensor, memory.data_ptr())
        self.memory.append(memory)
