# SPDX-License-Identifier: Apache-2.0
"""Stubs of the compiled extension (csrc/bindings). Tensors are torch CPU tensors or numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

_Tensor = Any

class _Isa(TypedDict):
    compiled: list[str]
    detected: str
    chosen: str
    reason: str

class _Threads(TypedDict):
    count: int
    source: str

class _Registration(TypedDict):
    op: str
    how: str
    reason: str

class _FormatFacts(TypedDict):
    bits: int
    kind: str  # "float", "integer", "lookup" or "semi_sparse" (csrc/formats/codec.hpp)
    zero: int
    code_max: int
    x_formats: tuple[str, ...]  # how activations may be taken with it

class _Rule(TypedDict):
    number: int
    moments: dict[str, tuple[bool, str | None]]  # can be negative; kept only where this number is not 0
    reads: tuple[str, ...]

class _Kernel(TypedDict):
    name: str
    backend: str
    device: str
    available: bool
    reason: str

class _ScoreProgram(TypedDict):
    is_mask: bool
    forward: str
    backward: str

class _Choice(TypedDict):
    name: str
    chosen: bool
    reason: str

version: str
LAYOUT: str
LAYOUTS: dict[str, int]
LAYOUT_VERSION: int
FORMATS: dict[str, int]
FORMAT_FACTS: dict[str, _FormatFacts]
X_FORMATS: dict[str, int]
GGUF_TYPES: dict[str, dict[str, Any]]
ACTIVATIONS: dict[str, int]
SCORINGS: dict[str, int]
MAPPINGS: dict[str, int]
SCALE_CHOICES: dict[str, int]
OPS: tuple[str, ...]
OPTIM_RULES: dict[str, _Rule]
OPTIM_HYPER: tuple[str, ...]
STATE_FORMATS: dict[str, int]
SCORE_OPS: dict[str, tuple[int, str]]

def isa() -> _Isa: ...
def threads() -> _Threads: ...
def opened_regions() -> int: ...

class OnCallerIfCrowded:
    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

def register_torch() -> list[_Registration]: ...
def check_call(op: str, arguments: list[Any]) -> None: ...
def new_program_number() -> int: ...
def forget_program(number: int) -> None: ...
def entries_are(dicts: list[dict[str, Any]], keys: list[str], values: list[Any]) -> bool: ...
def kernels(op: str) -> list[_Kernel]: ...
def explain_linear(m: int, n: int, k: int, format: int, group_size: int, asymmetric: bool, x_format: int, dtype: str,
                   device: str = "cpu", row: int = 0, activation: int = 0) -> list[_Choice]: ...  # fmt: skip
def select_linear(m: int, n: int, k: int, format: int, group_size: int, asymmetric: bool, x_format: int, dtype: str,
                  device: str = "cpu") -> str: ...  # fmt: skip
def select_experts(gate_up_args: tuple[int, int, int, int, bool, int], down_args: tuple[int, int, int, int, bool, int],
                   dtype: str, device: str = "cpu") -> str: ...  # fmt: skip
def row_number(op: str, name: str) -> int: ...
def force_kernel(name: str | None) -> str | None: ...
def last_kernel(op: str) -> str: ...
def read_bandwidth(bytes: int, streams: int, threads: int, repeats: int = 1) -> float: ...
def packed_shape(layout: int, n: int, k: int, format: int, group_size: int, asymmetric: bool) -> tuple[int, int]: ...
def quantize(weight: _Tensor, packed: _Tensor, format: int, group_size: int, asymmetric: bool, mapping: int,
             scale: int = 0, importance: _Tensor | None = None) -> tuple[float, float, float]: ...  # fmt: skip
def repack(packed: _Tensor, layout: int, out: _Tensor, out_layout: int, n: int, k: int, format: int, group_size: int,
           asymmetric: bool) -> None: ...  # fmt: skip
def pack_mxfp4(codes: _Tensor, scales: _Tensor, halves: bool, out: _Tensor) -> None: ...
def pack_gguf(blocks: _Tensor, type: int, places: _Tensor | None, out: _Tensor) -> None: ...
def all_finite(tensor: _Tensor) -> bool: ...

class OptimStep:
    def __init__(self, rule: int, state_format: int, block_size: int, params: Sequence[_Tensor],
                 grads: Sequence[_Tensor], states: Sequence[Sequence[_Tensor]], scales: Sequence[Sequence[_Tensor]],
                 steps: Sequence[_Tensor], hyper: dict[str, float | bool], grad_scale: _Tensor | None = None,
                 found_inf: _Tensor | None = None, seed: int | None = None) -> None: ...  # fmt: skip
    def run(self) -> None: ...

def encode_state(values: _Tensor, state_format: int, is_signed: bool, block_size: int, codes: _Tensor,
                 scale: _Tensor) -> None: ...  # fmt: skip
def decode_state(codes: _Tensor, scale: _Tensor, state_format: int, is_signed: bool, block_size: int,
                 values: _Tensor) -> None: ...  # fmt: skip
def block_classes(code: list[int], captured: list[_Tensor], B: int, H: int, q_len: int, kv_len: int, q_block: int,
                  kv_block: int, classes: _Tensor) -> int: ...  # fmt: skip
def score_program_explain(code: list[int]) -> _ScoreProgram: ...
def score_program_source(code: list[int], captured: list[_Tensor], language: str) -> str: ...
def blocks_linear(x: _Tensor, codes: _Tensor, absmax: _Tensor, format: int, block_size: int, y: _Tensor,
                  bias: _Tensor | None = None, scale_codes: _Tensor | None = None, code_map: _Tensor | None = None,
                  offset: _Tensor | None = None) -> None: ...  # fmt: skip
def blocks_dequantize(codes: _Tensor, absmax: _Tensor, format: int, block_size: int, numel: int, begin: int,
                      out: _Tensor, scale_codes: _Tensor | None = None, code_map: _Tensor | None = None,
                      offset: _Tensor | None = None) -> None: ...  # fmt: skip
def int8_linear(x: _Tensor, weight: _Tensor, row_scale: _Tensor, column_scale: _Tensor, y: _Tensor,
                bias: _Tensor | None = None) -> None: ...  # fmt: skip
def c_declarations() -> dict[str, str]: ...
def register_torch_key(key: str) -> list[str]: ...
def look_at_devices() -> None: ...
def look_in(folders: Sequence[str]) -> None: ...

class _Cuda:
    def libraries(self) -> list[dict[str, str]]: ...
    def unavailable(self, index: int) -> str: ...
    def cudnn_missing(self) -> str: ...
    def prebuild(self, architecture: str) -> list[dict[str, str]]: ...

cuda: _Cuda

class _OneDNN:
    def facts(self) -> dict[str, str]: ...

onednn: _OneDNN

class _RecorderState(TypedDict):
    on: bool
    folder: str
    path: str
    reason: str
    watched: bool

class _Peak(TypedDict):
    what: str
    operations_per_s: float

class _Recorder:
    NAMES: str
    def state(self) -> _RecorderState: ...
    def start(self, records: int | None, folder: str) -> None: ...
    def snapshot(self) -> bytes: ...
    def dump(self, path: str, reason: str) -> str: ...
    def watch(self, seconds: float) -> None: ...
    def open_call(self, op: str, row: str, tensors: Sequence[tuple[str, Sequence[int]]], read: int,
                  group_sequence: int) -> tuple[int, int]: ...  # fmt: skip
    def close_call(self, handle: tuple[int, int], finished: bool) -> None: ...
    def set_rank(self, rank: int, world: int) -> None: ...
    def begin_profile(self) -> int: ...
    def end_profile(self, begin: int | None) -> bytes: ...
    def peak_rate(self, arithmetic: str, threads: int, repeats: int = 5) -> _Peak: ...

recorder: _Recorder

class _LevelZeroFacts(TypedDict):
    path: str
    reason: str
    names: list[str]

class _LevelZero:
    def facts(self) -> _LevelZeroFacts: ...
    def start(self) -> None: ...
    def modules(self) -> list[str]: ...
    def module(self, name: str) -> bytes: ...
    def modules_compiler(self) -> str: ...
    def modules_missing(self) -> str: ...

level_zero: _LevelZero

class _Run:
    def __init__(self, device: int, stream: int) -> None: ...

class _PrivateUse:
    Run = _Run
    def device_count(self) -> int: ...
    def empty(self, device: int, shape: Sequence[int], strides: Sequence[int], code: int, bits: int) -> object: ...
    def host_view(self, address: int, shape: Sequence[int], strides: Sequence[int], code: int, bits: int) -> object: ...
    def usage(self, device: int) -> dict[str, int]: ...
    def reset_peak(self, device: int) -> None: ...
    def functions(self) -> tuple[int, ...]: ...

private_use: _PrivateUse

class _Simulated:
    def start(self, devices: int, bytes: int) -> None: ...
    def device_count(self) -> int: ...
    def launches(self, device: int, stream: int | None) -> int: ...
    def inject(self, device: int, fault: str, after: int, times: int, microseconds: int) -> None: ...
    def recover(self, device: int) -> None: ...

simulated: _Simulated

class _Rows:
    def add_library(self, path: str) -> list[str]: ...
    def add_kernel(self, op: str, name: str, device: str, function: Callable[..., None],
                   refuses: Callable[..., str | None] | None, first: bool) -> None: ...  # fmt: skip
    def commit(self, by: str) -> None: ...

class _External:
    OPS: tuple[str, ...]
    Rows = _Rows
    def added(self) -> list[dict[str, str]]: ...

external: _External
