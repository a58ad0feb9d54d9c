# SPDX-License-Identifier: Apache-2.0
"""Every function of `_C` takes any object in any place: it works or raises, and the process lives on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lowbit import _C


@pytest.mark.parametrize("array", [np.zeros(3, dtype=[]), np.zeros((2, 3), dtype="V0"), np.zeros(0, dtype="V0")], ids=["no fields", "V0", "none"])
def test_elements_of_no_bytes_are_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="all_finite: tensor must have elements of some bytes"):
        _C.all_finite(array)


EXCHANGE_APIS = """
import ctypes
from lowbit import _C

new = ctypes.pythonapi.PyCapsule_New
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
for name in ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"):
    for api in (1, 64, 2**63, -1, 0, True, 1.5, "text", None, object(), new(8, b"another name", None), new(8, None, None)):
        try:
            _C.all_finite(type("Odd", (), {name: api})())
        except TypeError as error:
            print(error)
"""


def test_an_exchange_api_that_is_no_capsule_of_its_name_is_not_called(python: Callable[..., str]) -> None:
    lines = python(EXCHANGE_APIS).splitlines()
    assert lines == ["all_finite: tensor must be a torch CPU tensor or a numpy array, got Odd"] * 24


FUZZ = """
import random, re, numpy as np, torch
from lowbit import _C
rng = random.Random(0)

def objects():
    return [
        np.zeros(3, dtype=[]), np.zeros((2, 3), dtype="V0"), np.zeros(0, dtype="f4"), np.zeros((0, 4), dtype="f4"), np.float32(1), np.zeros((), dtype="f4"),
        np.zeros((4, 4), dtype="f4")[::-1, ::2], np.broadcast_to(np.float32(1), (3, 5)), np.zeros(4, dtype=">f4"), np.zeros(3, dtype="f4,i4"), np.zeros(2, dtype="U3"),
        np.zeros(2, dtype=object), np.zeros(2, dtype="c8"), np.zeros((1,) * 9, dtype="f4"), np.zeros(7, dtype="u1")[1:5].view("f4"),
        memoryview(b"abcd"), bytearray(8), b"", "text", None, 3, 1.5, [1, 2], object(),
        torch.zeros(3), torch.zeros(0, 3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 3).t(), torch.zeros(1).expand(3, 4), torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, device="meta"), torch.zeros(3).to_sparse(), torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.zeros(1, 2, 3, 0),
        torch.zeros(3, dtype=torch.int8), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool), torch.nn.Parameter(torch.zeros(3)), torch.tensor(1.0),
    ]

def argument(kind):
    if rng.random() < 0.1: return rng.choice(objects())
    if "bool" in kind: return rng.random() < 0.5
    if "float" in kind: return rng.choice([0.0, 1.0, -1.0, float("nan"), float("inf"), 1e300])
    if "int" in kind and "list" not in kind: return rng.choice([0, 1, 2, 3, -1, 32, 128, 2**31, -(2**63)])
    if "str" in kind: return rng.choice(["", "linear", "text"])
    if "bytes" in kind: return rng.choice([b"", b"x"])
    if "list" in kind or "iterable" in kind.lower(): return [rng.choice(objects()) for _ in range(rng.randrange(3))]
    return rng.choice(objects())

count = 0
for name in sorted(dir(_C)):
    function = getattr(_C, name)
    signature = (getattr(function, "__doc__", None) or "").partition("\\n")[0]
    if name in ("register_torch", "force_kernel", "read_bandwidth") or not signature.startswith(name + "("): continue
    kinds = re.findall(r"\\w+: ([^,=]+)", signature.partition(" -> ")[0])
    for _ in range(200):
        count += 1
        try:
            function(*[argument(kind) for kind in kinds])
        except (TypeError, ValueError, NotImplementedError, IndexError, RuntimeError, BufferError):
            pass
print(count)
"""


def test_no_object_ends_the_process(python: Callable[..., str]) -> None:
    assert int(python(FUZZ)) > 2000


def test_an_array_that_is_not_aligned_is_refused() -> None:
    array = np.frombuffer(bytearray(65), np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="all_finite: tensor must be aligned to its 4 bytes of float32"):
        _C.all_finite(array)
