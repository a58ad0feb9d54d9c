# SPDX-License-Identifier: Apache-2.0
"""Bad input to lowbit/lowbit.h: a status and a text that name the argument, and nothing is written."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from c_calls import INT32, INT64, STATUS, CTensor, c_tensor, c_weight, call, last_error, options, status
from torch import Tensor

from lowbit import _C

INT4 = _C.FORMATS["int4"]
Arguments = dict[str, Any]


def packed(n: int = 16, k: int = 64, format: int = INT4, group_size: int = 32, asymmetric: bool = False, layout: int = 0) -> Any:
    shape = _C.packed_shape(layout, n, k, format, group_size, asymmetric)
    return c_weight(torch.zeros(shape, dtype=torch.uint8), n, k, format, group_size, asymmetric, layout)


def experts(count: int = 3, n: int = 16, k: int = 64) -> Any:
    """The packed weights of some experts, one behind another."""
    data = packed(n, k).kept.repeat(count, 1)
    return c_weight(data, n, k, INT4, 32)


def changed(weight: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(weight, name, value)
    return weight


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, dtype=dtype)  # also where a call writes: zeros could be its result


def newer(name: str, **given: Any) -> Any:
    """Options of a program that knows one more field, which is set."""
    known = options(name, **given)

    class Newer(ctypes.Structure):
        _fields_ = [("known", type(known)), ("unknown", INT64)]

    longer = Newer(known, 1)
    longer.known.struct_size = ctypes.sizeof(Newer)
    longer.kept = known
    return longer


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int8)


# Calls that hold, with their arguments in order.
CALLS: dict[str, Callable[[], Arguments]] = {
    "quantize": lambda: {"weight": floats(16, 64), "packed": packed(), "options": options("quantize")},
    "dequantize": lambda: {"weight": packed(), "out": floats(16, 64)},
    "repack": lambda: {"from": packed(), "to": packed(layout=1)},
    "embedding": lambda: {"weight": packed(), "indices": torch.zeros(3, dtype=torch.int64), "out": floats(3, 64)},
    "linear": lambda: {"x": floats(5, 64), "weight": packed(), "y": floats(5, 16), "options": options("linear")},
    "experts": lambda: {"x": floats(5, 64), "gate_up": experts(n=128), "down": experts(), "index": torch.zeros(5, 2, dtype=torch.int32),
                        "weights": floats(5, 2), "y": floats(5, 16), "options": options("experts", activation=4)},
    "attention_forward": lambda: {"query": floats(1, 4, 3, 32), "key": floats(1, 2, 7, 32), "value": floats(1, 2, 7, 32), "out": floats(1, 4, 3, 32),
                                  "options": options("attention_forward")},
    "decode": lambda: {"query": floats(1, 4, 3, 32), "key": codes(1, 2, 7, 32), "value": codes(1, 2, 7, 32), "out": floats(1, 4, 3, 32),
                       "options": options("decode", k_scale=floats(1, 2, 7, 1), v_scale=floats(1, 2, 7, 1))},
    "kv_quantize": lambda: {"x": floats(1, 2, 3, 32), "codes": codes(1, 2, 3, 32), "scale": floats(1, 2, 3, 1), "rotate": 0},
    "kv_dequantize": lambda: {"codes": codes(1, 2, 3, 32), "scale": floats(1, 2, 3, 1), "x": floats(1, 2, 3, 32), "rotated": 0},
    "rms_norm": lambda: {"x": floats(5, 64), "weight": floats(64), "eps": 1e-5, "y": floats(5, 64), "options": options("rms_norm")},
    "rope_append": lambda: {"qkv": floats(1, 3, 8, 32), "cos": floats(1, 3, 32), "sin": floats(1, 3, 32), "start": 2,
                            "keys": floats(1, 2, 9, 32), "values": floats(1, 2, 9, 32), "rotated": floats(1, 4, 3, 32), "options": options("rope_append")},
}  # fmt: skip

# function, argument, what takes its place, kind of error, text
WRONG: list[tuple[str, str, Callable[[], Any], str, str]] = [
    ("quantize", "weight", lambda: floats(16, 65), "value", "quantize: weight must have shape"),
    ("quantize", "weight", lambda: floats(16, 64, dtype=torch.float64), "type", "quantize: weight must be float32"),
    ("quantize", "weight", lambda: floats(16, 64) / 0, "value", "quantize: weight must be finite"),
    ("quantize", "weight", lambda: floats(64, 16).t(), "value", "quantize: weight must be contiguous"),
    ("quantize", "packed", lambda: packed(asymmetric=True), "value", "quantize: mapping must be asymmetric with asymmetric=1, got symmetric"),
    ("quantize", "packed", lambda: packed(layout=1), "value", "quantize: packed must be in the layout x86-panel-16x64"),
    ("quantize", "packed", lambda: changed(packed(), bytes=64), "value", "quantize: packed must have the 704 bytes of int4"),
    ("quantize", "packed", lambda: changed(packed(), data=None), "value", "quantize: packed must have data, got NULL"),
    ("quantize", "packed", lambda: changed(packed(), struct_size=8), "value", "quantize: packed must have struct_size"),
    ("quantize", "options", lambda: options("quantize", mapping=3), "value", "quantize: mapping must be 0..2"),
    ("quantize", "options", lambda: options("quantize", scale_choice=-1), "value", "quantize: scale must be 0..1"),
    ("quantize", "options", lambda: options("quantize", importance=floats(64)), "value", "quantize: importance must be None unless scale is search"),
    ("quantize", "options", lambda: options("quantize", scale_choice=1, importance=floats(63)), "value", "importance must have shape"),
    ("quantize", "options", lambda: options("quantize", struct_size=0), "value", "quantize: options must have struct_size set to sizeof"),
    ("dequantize", "weight", lambda: changed(packed(), format=99), "value", "dequantize: format must be 0.."),
    ("dequantize", "weight", lambda: changed(packed(), format=-1), "value", "dequantize: format must be 0.."),
    ("dequantize", "weight", lambda: changed(packed(), n=0), "value", "dequantize: n and k must be at least 1"),
    ("dequantize", "weight", lambda: changed(packed(), n=2**40, k=2**40), "value", "weight must have at most 2^56 elements"),
    ("dequantize", "weight", lambda: changed(packed(), group_size=48), "value", "dequantize: group_size must be 32, 64"),
    ("dequantize", "weight", lambda: changed(packed(), layout=2), "value", "dequantize: layout must be 0..1"),
    ("dequantize", "out", lambda: floats(16, 63), "value", "dequantize: out must have shape [16, 64]"),
    ("dequantize", "out", lambda: floats(16, 64, dtype=torch.float16), "type", "dequantize: out must be float32"),
    ("repack", "to", lambda: packed(n=32, layout=1), "value", "repack: to must have the format, n, k"),
    ("repack", "from", lambda: changed(packed(), bytes=0), "value", "repack: from must have the 704 bytes"),
    ("embedding", "indices", lambda: torch.tensor([0, 16, 3]), "index", "embedding: indices must be 0..15"),
    ("embedding", "indices", lambda: floats(3), "type", "embedding: indices must be int32 or int64"),
    ("embedding", "indices", lambda: torch.zeros(6, dtype=torch.int64)[::2], "value", "embedding: indices must be contiguous"),
    ("embedding", "out", lambda: floats(3, 63), "value", "embedding: out must have shape [3, 64]"),
    ("embedding", "out", lambda: floats(3, 64, dtype=torch.float64), "type", "embedding: the result must be float32"),
    ("linear", "x", lambda: floats(5, 63), "runtime", "linear: the last dimension of x must be k=64"),
    ("linear", "x", lambda: floats(64, 5).t(), "value", "linear: x must be contiguous"),
    ("linear", "x", lambda: codes(5, 64), "type", "linear: x must be float32"),
    ("linear", "x", lambda: changed(c_tensor(floats(5, 64)), dtype=17), "type", "linear: x must have a dtype of enum lowbit_dtype"),
    ("linear", "x", lambda: changed(c_tensor(floats(5, 64)), rank=9), "value", "linear: x must have rank 0..8"),
    ("linear", "x", lambda: changed(c_tensor(floats(5, 64)), shape=None), "value", "linear: x must have a shape, got NULL"),
    ("linear", "weight", lambda: packed(layout=1), "value", "linear: weight must be in the layout"),
    ("linear", "y", lambda: floats(4, 16), "value", "linear: y must have shape [5, 16]"),
    ("linear", "y", lambda: floats(5, 17), "value", "linear: the result must be contiguous with last dimension n=16"),
    ("linear", "y", lambda: floats(5, 16, dtype=torch.bfloat16), "value", "linear: the result must be"),
    ("linear", "options", lambda: options("linear", x_format=9), "value", "linear: x_format must be 0.."),
    ("linear", "options", lambda: options("linear", x_format=4), "value", "linear: x_format must be"),
    ("linear", "options", lambda: options("linear", activation=5), "value", "linear: activation must be 0..4"),
    ("linear", "options", lambda: options("linear", bias=floats(15)), "value", "linear: bias must be a contiguous [n=16]"),
    ("linear", "options", lambda: options("linear", mul=floats(5, 15)), "value", "linear: mul must have the shape"),
    ("linear", "options", lambda: options("linear", add=floats(5, 16, dtype=torch.float16)), "type", "linear: add must have the dtype of x"),
    ("linear", "options", lambda: newer("linear"), "value", "linear: options has a field that API version 1"),
    ("linear", "options", lambda: options("linear", struct_size=2**62), "value", "linear: options must have struct_size"),
    ("experts", "x", lambda: floats(5, 63), "value", "experts: x must have shape [T, k] with k=64"),
    ("experts", "gate_up", lambda: experts(n=64), "value", "experts: n of gate_up must be twice the k of down"),
    ("experts", "gate_up", lambda: changed(experts(n=128), bytes=705), "value", "experts: gate_up must have a multiple of the"),
    ("experts", "gate_up", lambda: changed(experts(n=128), layout=1), "value", "experts: gate_up must have a multiple of the"),
    ("experts", "down", lambda: experts(count=2), "value", "experts: down must have shape [3, "),
    ("experts", "down", lambda: changed(experts(), data=None), "value", "experts: down must have data, got NULL"),
    ("experts", "index", lambda: torch.full((5, 2), 4), "value", "experts: index must be 0 to 2"),
    ("experts", "index", lambda: floats(5, 2), "type", "experts: index must be int32 or int64"),
    ("experts", "weights", lambda: floats(5, 3), "value", "experts: weights must have shape [5, 2]"),
    ("experts", "y", lambda: floats(5, 17), "value", "experts: y must have shape [5, 16]"),
    ("experts", "y", lambda: floats(5, 16, dtype=torch.bfloat16), "type", "experts: y must be float32"),
    ("experts", "options", lambda: options("experts", activation=6), "value", "experts: activation must be 0..5"),
    ("experts", "options", lambda: options("experts", activation=4, no_gate=1, interleaved=1), "value", "experts without a gate"),
    ("experts", "options", lambda: options("experts", activation=4, down_x_format=9), "value", "x_format must be 0.."),
    ("experts", "options", lambda: options("experts", activation=4, down_bias=floats(3, 15)), "value", "down_bias must have shape [3, 16]"),
    ("attention_forward", "query", lambda: floats(4, 3, 32), "value", "attention_forward: query must have shape"),
    ("attention_forward", "query", lambda: floats(1, 3, 3, 32), "value", "attention_forward: the heads of query must be a multiple"),
    ("attention_forward", "key", lambda: floats(1, 2, 7, 31), "value", "attention_forward: key must have shape"),
    ("attention_forward", "value", lambda: floats(1, 2, 7, 64)[..., ::2], "value", "attention_forward: value must be dense"),
    ("attention_forward", "out", lambda: floats(1, 4, 2, 32), "value", "attention_forward: out must have shape"),
    ("attention_forward", "options", lambda: options("attention_forward", scale=float("nan")), "value", "scale must be finite"),
    ("attention_forward", "options", lambda: options("attention_forward", mask=floats(1, 4, 3, 6)), "value", "mask must have shape"),
    ("attention_forward", "options", lambda: options("attention_forward", sink=floats(3)), "value", "sink must have shape"),
    ("attention_forward", "options", lambda: options("attention_forward", lse=floats(1, 4, 2)), "value", "lse must have shape"),
    ("decode", "query", lambda: floats(1, 4, 3, 32, dtype=torch.float64), "type", "decode: query must be float32"),
    ("decode", "key", lambda: codes(1, 2, 7, 31), "value", "decode: key must have shape"),
    ("decode", "value", lambda: floats(1, 2, 7, 32), "type", "decode: value must have the dtype of key"),
    ("decode", "out", lambda: floats(1, 4, 3, 32, dtype=torch.bfloat16), "type", "decode: out must have the dtype of query"),
    ("decode", "options", lambda: options("decode"), "type", "decode: k_scale must be float32 or float16"),
    ("decode", "options", lambda: options("decode", k_scale=floats(1, 2, 7, 1), v_scale=floats(1, 2, 7, 2)), "value", "decode: v_scale must have shape"),
    ("decode", "options", lambda: options("decode", k_scale=floats(1, 2, 7, 1), v_scale=floats(1, 2, 7, 1), window=-1), "value", "decode: window must be"),
    ("kv_quantize", "x", lambda: codes(1, 2, 3, 32), "type", "kv_quantize: x must be float32"),
    ("kv_quantize", "codes", lambda: codes(1, 2, 3, 31), "value", "kv_quantize: codes must have shape"),
    ("kv_quantize", "codes", lambda: floats(1, 2, 3, 32), "type", "kv_quantize: codes must be int8 or uint8"),
    ("kv_quantize", "scale", lambda: floats(1, 2, 3, 2), "value", "kv_quantize: scale must have shape"),
    ("kv_dequantize", "scale", lambda: codes(1, 2, 3, 1), "type", "kv_dequantize: scale must be float32 or float16"),
    ("kv_dequantize", "x", lambda: floats(1, 2, 4, 32), "value", "kv_dequantize: codes must have shape"),
    ("rms_norm", "weight", lambda: floats(63), "value", "rms_norm: weight must have shape [64]"),
    ("rms_norm", "eps", lambda: -1.0, "value", "rms_norm: eps must be finite and not negative"),
    ("rms_norm", "y", lambda: floats(5, 63), "value", "rms_norm: y must have shape [5, 64]"),
    ("rms_norm", "options", lambda: options("rms_norm", add=floats(4, 64)), "value", "rms_norm: add must have shape [5, 64]"),
    ("rope_append", "qkv", lambda: floats(1, 3, 3, 32), "value", "rope_append: qkv must have at least two heads"),
    ("rope_append", "cos", lambda: floats(1, 3, 31), "value", "rope_append: sin must have shape"),
    ("rope_append", "start", lambda: 7, "value", "rope_append: keys must have room for tokens 7 to 10"),
    ("rope_append", "values", lambda: floats(1, 2, 8, 32), "value", "rope_append: values must have shape"),
    ("rope_append", "rotated", lambda: floats(1, 4, 2, 32), "value", "rope_append: rotated must have shape [1, 4, 3, 32]"),
    ("rope_append", "options", lambda: options("rope_append", q_weight=floats(31)), "value", "q_weight must have shape [32]"),
]  # fmt: skip


def memory_of(arguments: Arguments) -> list[Tensor]:
    """Every tensor and packed weight, to be seen unchanged."""
    held = [getattr(value, "kept", value) for value in arguments.values()]
    return [value[0] if isinstance(value, tuple) else value for value in held if isinstance(value, (Tensor, tuple))]


@pytest.mark.parametrize("function", CALLS)
def test_calls_hold_as_they_are(function: str) -> None:
    call(function, *CALLS[function]().values())


@pytest.mark.parametrize("function", CALLS)
def test_a_wrong_argument_is_named_and_nothing_is_written(function: str, subtests: pytest.Subtests) -> None:
    cases = [case for case in WRONG if case[0] == function]
    assert cases
    for _, name, make, kind, text in cases:
        with subtests.test(argument=name, text=text):
            arguments = CALLS[function]()
            arguments[name] = make()
            before = [tensor.clone() for tensor in memory_of(arguments)]
            assert status(function, *arguments.values()) == STATUS[kind], last_error()
            assert text in last_error()
            assert all(map(torch.equal, before, memory_of(arguments)))


@pytest.mark.parametrize("function", CALLS)
def test_what_must_be_given_is_named(function: str, subtests: pytest.Subtests) -> None:
    """A NULL, a tensor of dtype LOWBIT_NOT_GIVEN, and one without data; sizes that no memory has."""
    for name, value in CALLS[function]().items():
        if name == "options" or not isinstance(value, (Tensor, ctypes.Structure)):
            continue
        with subtests.test(argument=name):
            bad = [None]
            if isinstance(value, Tensor):
                negative = (INT64 * value.dim())(-1, *value.shape[1:])
                huge = (INT64 * value.dim())(2**62, *value.shape[1:])
                bad += [c_tensor(value, dtype=9), c_tensor(value, data=None)]
                bad += [c_tensor(value, shape=ctypes.addressof(negative)), c_tensor(value, shape=ctypes.addressof(huge))]
            for wrong in bad:
                arguments = CALLS[function]() | {name: wrong}
                assert status(function, *arguments.values()) in (STATUS["value"], STATUS["runtime"]), last_error()
                assert last_error().startswith(f"{function}: {name} must"), last_error()


def test_every_pointer_that_is_written_must_be_given() -> None:
    number, numbers = INT32(), INT64()
    assert status("find_format", None, ctypes.byref(number)) == STATUS["value"] and "find_format" in last_error()
    assert status("find_format", b"int4", None) == STATUS["value"] and "find_format" in last_error()
    assert status("find_format", b"int44", ctypes.byref(number)) == STATUS["value"] and "float32, bfloat16" in last_error()
    assert status("packed_bytes", None, ctypes.byref(numbers)) == STATUS["value"] and "weight must be given" in last_error()
    assert status("packed_bytes", packed(), None) == STATUS["value"] and "bytes must be given" in last_error()
    assert status("kv_sizes", 5, 32, None, ctypes.byref(numbers)) == STATUS["value"] and "row_bytes and groups" in last_error()
    assert status("kv_sizes", 0, 32, ctypes.byref(numbers), ctypes.byref(numbers)) == STATUS["type"] and "dtype must be" in last_error()
    assert status("kv_sizes", 5, 513, ctypes.byref(numbers), ctypes.byref(numbers)) == STATUS["value"] and "columns must be 1..512" in last_error()
    assert status("as_team", None, None) == STATUS["value"] and "as_team: body" in last_error()
    for threads in (-1, 1025):
        assert status("set_num_threads", threads) == STATUS["value"] and "threads must be 1..1024" in last_error()


def test_options_of_a_newer_program_serve_where_their_new_field_is_not_set() -> None:
    arguments = CALLS["linear"]()
    longer = newer("linear")
    longer.unknown = 0
    call("linear", *(arguments | {"options": longer}).values())


def test_a_query_before_the_tokens_is_refused() -> None:
    arguments = CALLS["decode"]() | {"query": floats(1, 4, 8, 32), "out": floats(1, 4, 8, 32)}
    scales = {"k_scale": floats(1, 2, 7, 1), "v_scale": floats(1, 2, 7, 1)}
    for placed in ({"causal": 1}, {"window": 3}):
        arguments["options"] = options("decode", **scales, **placed)
        assert status("decode", *arguments.values()) == STATUS["value"] and "got 8 queries and 7 tokens" in last_error()


def test_a_row_that_cannot_serve_is_not_implemented() -> None:
    with _forced("linear_int8_avx2"):
        assert status("linear", *CALLS["linear"]().values()) == STATUS["not implemented"]
    assert "no kernel row fits (forced: linear_int8_avx2)" in last_error()


class _forced:
    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.before = _C.force_kernel(self.name)

    def __exit__(self, *_: Any) -> None:
        _C.force_kernel(self.before)


def test_each_thread_has_its_own_last_error() -> None:
    assert status("dequantize", packed(), None) == STATUS["value"]
    seen = []

    def other() -> None:
        seen.append(last_error())
        status("dequantize", None, CTensor())
        seen.append(last_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == ["", "dequantize: weight must be given, got NULL"]
    assert last_error() == "dequantize: out must be given, got none"
    call("dequantize", *CALLS["dequantize"]().values())
    assert last_error() == "dequantize: out must be given, got none", "a call that succeeds leaves the text"


def test_a_program_without_libtorch_is_told_that_it_has_none(python: Callable[..., str]) -> None:
    code = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.lowbit_last_error.restype = ctypes.c_char_p
print(library.lowbit_register_torch(), library.lowbit_last_error().decode())
"""
    library = Path(_C.__file__).parent / "liblowbit.so"
    wanted = f"{STATUS['runtime']} lowbit::linear: torch is not loaded (no libtorch_cpu in this process)"
    assert python(code, str(library)).strip() == wanted
