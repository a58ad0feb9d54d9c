# SPDX-License-Identifier: Apache-2.0
"""Quantize a GGUF file of floats by llama.cpp, with an importance matrix if one is given.

    ~/llama/bin/python benchmarks/llama_quantize.py floats.gguf Q4_K_M out.gguf --importance importance.npz

Runs in an environment with llama-cpp-python (0.3.36). The npz file has an array by the name of each tensor, the mean of
x^2 of each of its input channels.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import llama_cpp
import numpy as np


def importance_of(path: Path) -> ctypes.Array:
    """The array of llama.cpp that ends with an entry without a name; it keeps what it points to alive."""
    arrays = {name: np.ascontiguousarray(values, np.float32) for name, values in np.load(path).items()}
    entries = (llama_cpp.llama_model_imatrix_data * (len(arrays) + 1))()
    for entry, (name, values) in zip(entries, arrays.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    entries.arrays = arrays
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("type", help="Q4_0, Q4_K_M and so on")
    parser.add_argument("out", type=Path)
    parser.add_argument("--importance", type=Path)
    options = parser.parse_args()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{options.type}")
    if options.importance:
        entries = importance_of(options.importance)
        parameters.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    paths = str(options.file).encode(), str(options.out).encode()
    if llama_cpp.llama_model_quantize(*paths, ctypes.byref(parameters)):
        raise SystemExit(f"llama_quantize: llama.cpp could not quantize {options.file} to {options.type}")


if __name__ == "__main__":
    main()
