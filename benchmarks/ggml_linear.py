# SPDX-License-Identifier: Apache-2.0
"""Linear layers of llama.cpp and of its fork ik_llama.cpp, driven through the C API of ggml, which both have.

A library is built outside the repository (docs/measured/linear.md has the commands) and named with its path. Weights
are packed by the library itself, without an importance matrix; x and y are torch's memory, threads as torch has them.
They differ: ik_llama.cpp has repacked types of its own; llama.cpp repacks by the kind of buffer that holds the weight,
and gets, as its loader does, the first kind that takes the product (tiles for AMX, then rows interleaved, then as it
is). llama.cpp configures the tile unit once per thread, and dies of SIGILL when oneDNN has released it: as "llama.cpp"
it is driven without tiles, as "llama.cpp amx" with them, and then torch's peers stay out.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

import torch
from harness import MIB
from torch import Tensor

F32 = 0
TYPES = {  # ggml_type by ggml_type_name
    "llama.cpp": {"q4_0": 2, "q8_0": 8, "q4_K": 12},
    "llama.cpp amx": {"q4_0": 2, "q8_0": 8, "q4_K": 12},
    "ik_llama.cpp": {"q4_0": 2, "q8_0": 8, "q4_0_r8": 202, "q8_0_r8": 208, "q4_k_r4": 212, "q8_k_r8": 399},
}
Pointer, Size, Long, Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", Size), ("mem_buffer", Pointer), ("no_alloc", ctypes.c_bool))


API: dict[str, tuple[type | None, list[type]]] = {
    "ggml_init": (Pointer, [InitParams]),
    "ggml_type_name": (ctypes.c_char_p, [Int]),
    "ggml_row_size": (Size, [Int, Long]),
    "ggml_new_tensor_2d": (Pointer, [Pointer, Int, Long, Long]),
    "ggml_new_tensor_4d": (Pointer, [Pointer, Int, Long, Long, Long, Long]),
    "ggml_permute": (Pointer, [Pointer, Pointer, Int, Int, Int, Int]),
    "ggml_mul_mat": (Pointer, [Pointer, Pointer, Pointer]),
    "ggml_flash_attn_ext": (Pointer, [Pointer] * 5 + [ctypes.c_float] * 3),
    "ggml_new_graph_custom": (Pointer, [Pointer, Size, ctypes.c_bool]),
    "ggml_build_forward_expand": (None, [Pointer, Pointer]),
    # ik_llama.cpp's takes one pointer more at the end; llama.cpp's leaves it unread
    "ggml_quantize_chunk": (Size, [Int, Pointer, Pointer, Long, Long, Long, Pointer, Pointer]),
    "ggml_backend_cpu_init": (Pointer, []),
    "ggml_backend_cpu_set_n_threads": (None, [Pointer, Int]),
    "ggml_backend_cpu_buffer_type": (Pointer, []),
    "ggml_backend_cpu_buffer_from_ptr": (Pointer, [Pointer, Size]),
    "ggml_backend_buft_alloc_buffer": (Pointer, [Pointer, Size]),
    "ggml_backend_buft_get_alloc_size": (Size, [Pointer, Pointer]),
    "ggml_backend_buffer_get_base": (Pointer, [Pointer]),
    "ggml_backend_buffer_free": (None, [Pointer]),
    "ggml_backend_tensor_alloc": (None, [Pointer, Pointer, Pointer]),
    "ggml_backend_tensor_set": (None, [Pointer, Pointer, Size, Size]),
    "ggml_backend_supports_op": (ctypes.c_bool, [Pointer, Pointer]),
    "ggml_backend_graph_compute": (Int, [Pointer, Pointer]),
}
REGISTRY_API: dict[str, tuple[type | None, list[type]]] = {  # llama.cpp's alone
    "ggml_backend_cpu_reg": (Pointer, []),
    "ggml_backend_buft_name": (ctypes.c_char_p, [Pointer]),
    "ggml_backend_reg_dev_get": (Pointer, [Pointer, Size]),
    "ggml_backend_reg_get_proc_address": (Pointer, [Pointer, ctypes.c_char_p]),
}


class Library:
    """A built ggml.

    Args:
        name: one of `TYPES`.
        path: of its libggml.so.

    Raises:
        ValueError: the name is another, or the library does not call a type as `TYPES` does.
    """

    def __init__(self, name: str, path: Path) -> None:
        if name not in TYPES:
            raise ValueError(f"--ggml: name must be one of {', '.join(TYPES)}, got {name}")
        self.name, self.types, self.api = name, TYPES[name], ctypes.CDLL(str(path))
        self.keeps_tiles = name == "llama.cpp amx"
        registered = hasattr(self.api, "ggml_backend_cpu_reg")
        for function, (result, arguments) in (API | (REGISTRY_API if registered else {})).items():
            getattr(self.api, function).restype = result
            getattr(self.api, function).argtypes = arguments
        self.context = self.api.ggml_init(InitParams(64 * MIB, None, True))  # shapes and graphs only, never freed
        for type_name, number in self.types.items():
            if (got := self.api.ggml_type_name(number)) != type_name.encode():
                raise ValueError(f"--ggml: type {number} of {name} must be {type_name}, got {got}: {path}")
        self.backend = self.api.ggml_backend_cpu_init()
        self.buffer_types = self._repacking_buffer_types() if registered else []
        self.buffer_types.append(self.api.ggml_backend_cpu_buffer_type())

    def _repacking_buffer_types(self) -> list[int]:
        registry = self.api.ggml_backend_cpu_reg()
        address = self.api.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(Pointer), Pointer)(address)
        pointers, found = extra(self.api.ggml_backend_reg_dev_get(registry, 0)), []
        while (pointer := pointers[len(found)]) is not None:  # ends with a null
            found.append(pointer)
        return [each for each in found if self.keeps_tiles or self.api.ggml_backend_buft_name(each) != b"AMX"]

    def tensor(self, number: int, columns: int, rows: int) -> int:
        return self.api.ggml_new_tensor_2d(self.context, number, columns, rows)

    def pack(self, type_name: str, weight: Tensor) -> Tensor:
        """float32 [n, k] -> uint8 [n, bytes of a row]."""
        number, (n, k) = self.types[type_name], weight.shape
        packed = torch.empty(n, self.api.ggml_row_size(number, k), dtype=torch.uint8)
        weight = weight.contiguous()
        self.api.ggml_quantize_chunk(number, weight.data_ptr(), packed.data_ptr(), 0, n, k, None, None)
        return packed


class GgmlLinear:
    """x [m, k] -> y [m, n], float32; the next call with the same x overwrites y.

    Args:
        library: whose product it is.
        type_name: of the weight.
        packed: the weight, as `Library.pack` makes it.
        k: columns of the weight.
    """

    def __init__(self, library: Library, type_name: str, packed: Tensor, k: int) -> None:
        self.library, self.type_name, self.packed, self.k = library, type_name, packed, k
        self.graphs: dict[tuple[int, int], tuple[int, Tensor, Tensor]] = {}
        probe = library.tensor(F32, k, 1)
        for buffer_type in library.buffer_types:
            self.weight = self._weight_in(buffer_type)
            product = library.api.ggml_mul_mat(library.context, self.weight, probe)
            if library.api.ggml_backend_supports_op(library.backend, product):
                break
        else:
            raise NotImplementedError(f"{library.name} does not multiply {type_name} here")
        library.api.ggml_backend_tensor_set(self.weight, packed.data_ptr(), 0, packed.nbytes)

    def __deepcopy__(self, memo: object) -> GgmlLinear:
        return GgmlLinear(self.library, self.type_name, self.packed, self.k)

    def __call__(self, x: Tensor) -> Tensor:
        key = (x.data_ptr(), x.shape[0])
        if key not in self.graphs:
            self.graphs[key] = self._graph(x)
        graph, _, y = self.graphs[key]
        api, backend = self.library.api, self.library.backend
        api.ggml_backend_cpu_set_n_threads(backend, torch.get_num_threads())
        if status := api.ggml_backend_graph_compute(backend, graph):
            raise RuntimeError(f"ggml_backend_graph_compute of {self.library.name} returned {status}")
        return y

    def _weight_in(self, buffer_type: int) -> int:
        api = self.library.api
        weight = self.library.tensor(self.library.types[self.type_name], self.k, len(self.packed))
        size = api.ggml_backend_buft_get_alloc_size(buffer_type, weight)
        buffer = self._owned(api.ggml_backend_buft_alloc_buffer(buffer_type, size))
        api.ggml_backend_tensor_alloc(buffer, weight, api.ggml_backend_buffer_get_base(buffer))
        return weight

    def _graph(self, x: Tensor) -> tuple[int, Tensor, Tensor]:
        api, context = self.library.api, self.library.context
        y = torch.empty(x.shape[0], len(self.packed))
        source = self.library.tensor(F32, self.k, x.shape[0])
        product = api.ggml_mul_mat(context, self.weight, source)
        for tensor, memory in ((source, x), (product, y)):
            buffer = self._owned(api.ggml_backend_cpu_buffer_from_ptr(memory.data_ptr(), memory.nbytes))
            api.ggml_backend_tensor_alloc(buffer, tensor, memory.data_ptr())
        graph = api.ggml_new_graph_custom(context, 8, False)
        api.ggml_build_forward_expand(graph, product)
        return graph, x, y

    def _owned(self, buffer: int) -> int:
        weakref.finalize(self, self.library.api.ggml_backend_buffer_free, buffer)
        return buffer
