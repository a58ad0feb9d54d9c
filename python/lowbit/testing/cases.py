# SPDX-License-Identifier: Apache-2.0
"""Cases, error budgets and kernel rows, for the tests of lowbit and of other packages' kernels."""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit import _C
from lowbit.reference import layout
from lowbit.reference import linear as reference
from lowbit.reference import optim as optim_reference
from lowbit.reference.quantize import QuantizedWeight

M_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 32, 33, 47, 48, 63, 64, 65, 70)
N_SIZES = (1, 7, 15, 16, 17, 31, 33, 48, 64, 97, 130)
K_SIZES = (1, 3, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 192, 257, 300)
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
POST_OPS = tuple(itertools.product((None, "float32", "dtype of x"), ACTIVATIONS, (False, True), (False, True)))
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The max relative error of rounding to a dtype."""


@dataclass(frozen=True, slots=True)
class LinearCase:
    """One call of the op: shape, dtypes, format and post-op chain. They determine the data."""

    m: int
    n: int
    k: int
    dtype: str = "float32"
    format: str = "int8"
    group_size: int = 0
    mapping: str = "symmetric"
    x_format: str = "float"
    bias: str | None = None
    activation: str = "none"
    mul: bool = False
    add: bool = False

    def __str__(self) -> str:
        weight = f"{self.format}-g{self.group_size}-{self.mapping}-{self.x_format}"
        return (
            f"{self.m}x{self.n}x{self.k}-{self.dtype}-{weight}-{self.bias}-{self.activation}-{self.mul:d}{self.add:d}"
        )

    @property
    def asymmetric(self) -> bool:
        return self.mapping == "asymmetric"

    @property
    def op_args(self) -> tuple[int, int, int, int, bool, int]:
        """The arguments of the op between weight and bias."""
        return self.n, self.k, _C.FORMATS[self.format], self.group_size, self.asymmetric, _C.X_FORMATS[self.x_format]


def budget(dtype: str, k: int, *, magnitude: Tensor, linear_result: Tensor, post: LinearCase | None = None,
           mul: Tensor | None = None, add: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return the max allowed error of each element of a result, derived from the dtype and k alone.

    A float32 sum of k products, in any order and with any split of scales, has an error of at most (k + 8) roundings of
    2**-24 each, relative to ``magnitude`` = sum |x| |w| + |bias|. (The 8 are for decoding the scales, the zero point,
    and adding the bias.) For int4 and asymmetric weights, |w| here is scale * (|code - o| + |zero point - o|), because
    kernels may use codes relative to an offset o and subtract (zero point - o) * sum of x from the total
    (`lowbit.reference.linear.magnitude`). The activations have slope <= 1.13, and evaluating them adds 8 roundings of
    their argument. mul and add are one rounding each, and so is storing the result in its dtype. Integer products are
    exact, so quantized activations need no term of their own: the reference uses the same codes.

    Args:
        dtype: the dtype of the result.
        k: the length of the sum.
        magnitude: float64 ``[m, n]``.
        linear_result: x @ w.T + bias in float64, before the post-ops.
        post: the case, for its activation.
        mul: the factor, float64.
        add: the term, float64.

    Returns:
        The errors, float64 ``[m, n]``.
    """
    u = ROUNDOFF["float32"]
    error, result = (k + 8) * u * magnitude, linear_result
    if post is not None and post.activation != "none":
        error = 1.13 * error + 8 * u * result.abs()
        result = reference.ACTIVATIONS[post.activation](result)
    if mul is not None:
        result = result * mul
        error = error * mul.abs() + u * result.abs()
    if add is not None:
        result = result + add
        error = error + u * (result.abs() + add.abs())
    smallest = torch.finfo(getattr(torch, dtype)).smallest_normal
    return error + ROUNDOFF[dtype] * (result.abs() + error) + smallest * ROUNDOFF[dtype]


def format_cases() -> Iterator[tuple[str, int, str, str]]:
    """Yield every (format, group_size, mapping, x_format) that the op supports."""
    for name in formats_of_kind("float"):
        yield name, 0, "symmetric", "float"
    group_sizes = (0, 32, 64, 128, 256)
    for kind, mappings in (("integer", tuple(_C.MAPPINGS)), ("lookup", ("symmetric",))):
        for name in formats_of_kind(kind):
            facts = _C.FORMAT_FACTS[name]
            sizes = group_sizes + (16,) * (facts["smallest_group"] == 16)
            if facts["bits"] not in (4, 8):  # unpacked, and then int8 for every row
                yield from itertools.product((name,), (0, 16, 32, 128), ("symmetric", "asymmetric"), facts["x_formats"])
            else:
                yield from itertools.product((name,), sizes, mappings, facts["x_formats"])


def formats_of_kind(kind: str) -> list[str]:
    """Return the weight formats of this kind: float, integer or lookup."""
    return [name for name, facts in _C.FORMAT_FACTS.items() if facts["kind"] == kind]


def linear_cases(rounds: int = 2) -> list[LinearCase]:
    """Return each format ``rounds`` times, with shapes, dtypes and post-ops in rotation. The strides are coprime, so
    that their combinations vary."""
    cases = []
    for index, (format, group_size, mapping, x_format) in enumerate(itertools.chain(*[list(format_cases())] * rounds)):
        bias, activation, mul, add = POST_OPS[index * 7 % len(POST_OPS)]
        cases.append(
            LinearCase(
                m=M_SIZES[index * 5 % len(M_SIZES)],
                n=N_SIZES[index * 3 % len(N_SIZES)],
                k=K_SIZES[index * 4 % len(K_SIZES)],
                dtype=DTYPES[index % 4 % 3],
                format=format,
                group_size=group_size,
                mapping=mapping,
                x_format=x_format,
                bias=bias,
                activation=activation,
                mul=mul,
                add=add,
            )
        )
    # Rows with tiles require many rows of x, above all in float32 by float32.
    cases += [LinearCase(70, 37, 100, "float32", *format) for format in format_cases()]
    # Rows for bfloat16 alone require many rows of it.
    floats = [of for of in format_cases() if of[1] in (0, 64) and of[3] == "float"]
    cases += [LinearCase(70, 37, 100, "bfloat16", *of) for of in floats]
    return cases + _semi_sparse_cases()


def _semi_sparse_cases() -> list[LinearCase]:
    """Return cases of 2:4 weights, whose k is a multiple of 4."""
    sizes = ((1, 17, 36), (3, 33, 100), (5, 48, 260), (15, 7, 64), (16, 37, 100), (33, 130, 300), (70, 37, 100))
    formats = [
        (format, group_size, "symmetric", x_format)
        for format in formats_of_kind("semi_sparse")
        for group_size, x_format in itertools.product((0, 32, 256), _C.FORMAT_FACTS[format]["x_formats"])
    ]
    return [
        LinearCase(*size, DTYPES[index % 3], *of, *POST_OPS[index * 7 % len(POST_OPS)])
        for index, (of, size) in enumerate(itertools.product(formats, sizes))
    ]


def dense_formats() -> list[str]:
    """Return the weight formats without sparsity, which GPUs have kernels for."""
    return [name for name, facts in _C.FORMAT_FACTS.items() if facts["kind"] != "semi_sparse"]


device = "cpu"
"""The type of the device whose kernel rows are tested, as in `lowbit.kernels`."""


def rows(op: str = "linear") -> list[dict[str, object]]:
    """Return the kernel rows of an op on `device`: ``{"name", "backend", "device", "available", "reason"}``."""
    return [dict(row) for row in _C.kernels(op) if row["device"] == device]


def attention_dtypes(row: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a row of attention supports. A row for float32 converts 16-bit inputs to it."""
    dtype = row.split("_")[2]
    return tuple(getattr(torch, name) for name in (DTYPES if dtype == "float32" else (dtype,)))


def fewest_scores(row: str) -> tuple[int, int]:
    """Return the min numbers of queries and keys that a row of attention supports."""
    if not multiplies_parts(row):
        return 1, 1
    return (32, 256) if "_float16_" in row else (17, 32) if "_amx" in row else (33, 32)


def multiplies_parts(row: str) -> bool:
    """Whether a row multiplies bfloat16, or several bfloat16 parts, in tiles."""
    return "_amx" in row or "_avx512_bf16" in row


def serves(row: str, case: LinearCase, on: str | None = None) -> bool:
    """Whether the row of this name runs this call, by default on `device`."""
    n, k, format, group_size, asymmetric, x_format = case.op_args
    previous = _C.force_kernel(row)
    try:
        weight = n, k, format, group_size, asymmetric, x_format
        activation = _C.ACTIVATIONS[case.activation]
        choices = _C.explain_linear(case.m, *weight, case.dtype, on or device, activation=activation)
    finally:
        _C.force_kernel(previous)
    return any(choice["chosen"] for choice in choices)


def pack_weight(
    weight: Tensor,
    format: str,
    group_size: int = 0,
    mapping: str = "symmetric",
    scale: str = "absmax",
    importance: Tensor | None = None,
) -> Tensor:
    """Quantize ``[n, k]`` into a packed weight with the kernel."""
    asymmetric = mapping == "asymmetric"
    packed = empty_packed(*weight.shape, format, group_size, asymmetric)
    choice = _C.MAPPINGS[mapping], _C.SCALE_CHOICES[scale]
    _C.quantize(weight, packed, _C.FORMATS[format], group_size, asymmetric, *choice, importance)
    return packed


def empty_packed(
    n: int, k: int, format: str, group_size: int = 0, asymmetric: bool = False, layout: str = _C.LAYOUT
) -> Tensor:
    """Return zeros in the shape of a packed weight."""
    return torch.zeros(
        _C.packed_shape(_C.LAYOUTS[layout], n, k, _C.FORMATS[format], group_size, asymmetric), dtype=torch.uint8
    )


def repack(
    packed: Tensor, layout: str, to: str, n: int, k: int, format: str, group_size: int = 0, asymmetric: bool = False
) -> Tensor:
    """Return a packed weight in another layout, converted by the kernel."""
    out = empty_packed(n, k, format, group_size, asymmetric, to)
    _C.repack(packed, _C.LAYOUTS[layout], out, _C.LAYOUTS[to], n, k, _C.FORMATS[format], group_size, asymmetric)
    return out


def pack_codes(codes: Tensor, scale: Tensor, zero: Tensor | None, format: str, group_size: int = 0) -> Tensor:
    """Return plain codes ``[n, k]``, scales and zero points ``[n, groups]`` as a packed weight."""
    rows = layout.row_major(QuantizedWeight.of(codes, scale, zero, format, group_size))
    return repack(rows, "row-major", _C.LAYOUT, *codes.shape, format, group_size, zero is not None)


def decode_weight(
    packed: Tensor, n: int, k: int, format: str, group_size: int, mapping: str
) -> QuantizedWeight | Tensor:
    """Read a packed weight with the reference; return a `QuantizedWeight`, or the float ``[n, k]``."""
    if _C.FORMAT_FACTS[format]["kind"] == "float":
        return layout.unpack_float(packed, n, k, format)
    return layout.unpack(packed, n, k, format, group_size, mapping == "asymmetric")


@dataclass(frozen=True, slots=True)
class LinearData:
    """The inputs of a case, the float64 result, and the allowed error of each element."""

    x: Tensor
    packed: Tensor
    bias: Tensor | None
    mul: Tensor | None
    add: Tensor | None
    wanted: Tensor
    allowed: Tensor


def make_data(case: LinearCase, x: Tensor | None = None, weight: Tensor | None = None) -> LinearData:
    """Create the inputs of a case, except for x and the float weight if given, and evaluate the reference."""
    with _one_thread():
        return _make_data(case, x, weight)


def _make_data(case: LinearCase, x: Tensor | None, weight: Tensor | None) -> LinearData:
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = normal(case.m, case.k).to(dtype) if x is None else x
    weight = normal(case.n, case.k) if weight is None else weight
    bias = None if case.bias is None else normal(case.n).to(torch.float32 if case.bias == "float32" else dtype)
    mul = normal(case.m, case.n).to(dtype) if case.mul else None
    add = normal(case.m, case.n).to(dtype) if case.add else None
    packed = pack_weight(weight, case.format, case.group_size, case.mapping)
    decoded = decode_weight(packed, case.n, case.k, case.format, case.group_size, case.mapping)
    wanted = reference.linear(x, decoded, case.x_format, bias, case.activation, mul, add)
    magnitude = reference.magnitude(x, decoded, case.x_format)
    linear_result = reference.product(x, decoded, case.x_format)
    if bias is not None:
        magnitude, linear_result = magnitude + bias.double().abs(), linear_result + bias.double()
    allowed = budget(
        case.dtype,
        case.k,
        magnitude=magnitude,
        linear_result=linear_result,
        post=case,
        mul=None if mul is None else mul.double(),
        add=None if add is None else add.double(),
    )
    return LinearData(x, packed, bias, mul, add, wanted, allowed)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread in the block: the reference has small matrices, and on a busy machine a second thread costs more
    than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=8192)
def cached_data(case: LinearCase) -> LinearData:
    """Call `make_data` once per case, so that all rows get the same inputs."""
    return make_data(case)


def run_linear(case: LinearCase, data: LinearData, row: str | None = None) -> Tensor:
    """Run the op on a case, with one row if named. Fail if another row ran."""
    previous = _C.force_kernel(row)
    try:
        y = torch.ops.lowbit.linear(
            data.x, data.packed, *case.op_args, data.bias, _C.ACTIVATIONS[case.activation], data.mul, data.add
        )
    finally:
        _C.force_kernel(previous)
    if row is not None and _C.last_kernel("linear") != row:
        raise AssertionError(f"asked for row {row}, but {_C.last_kernel('linear')} ran")
    return y


def assert_within(actual: Tensor, wanted: Tensor, allowed: Tensor, what: str = "") -> None:
    """Fail unless every element is within its budget, and report the worst one. Non-finite values must be in the same
    places."""
    finite = wanted.isfinite() & (wanted.abs() <= torch.finfo(actual.dtype).max)
    if not torch.equal(actual.isfinite(), finite):
        raise AssertionError(
            f"{what}: {(actual.isfinite() != finite).sum()} elements are finite where the reference is not, or not"
        )
    excess = torch.where(finite, (actual.double() - wanted).abs() - allowed, -1.0)
    if excess.numel() and excess.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: element {list(at)} is {actual[at].item()!r}, wanted {wanted[at].item()!r} +- "
            f"{allowed[at].item():.3g}; "
            f"{int((excess > 0).sum())} of {excess.numel()} elements are off"
        )


STATE_FORMATS = tuple(_C.STATE_FORMATS)
HYPER = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "decoupled": True,
    "maximize": False,
    "amsgrad": False,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
}
"""The arguments of all rules of `_C.OptimStep`; a rule reads those that it has."""


@dataclass(slots=True)
class Moment:
    """One moment of one parameter as an optimizer stores it: values, or codes and scales."""

    format: str
    signed: bool
    block_size: int
    numel: int
    state: Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, values: Tensor, format: str, signed: bool, block_size: int) -> Moment:
        """Store values with the reference."""
        if format in ("float32", "bfloat16"):
            return cls(format, signed, block_size, values.numel(), values.to(getattr(torch, format)).clone(), None)
        scale = optim_reference.scales(values, format, block_size).float()
        spread = scale.double().repeat_interleave(block_size)[: values.numel()]
        relative = torch.where(spread > 0, values.double().flatten() / spread, 0.0)
        codes = optim_reference.nearest_code(relative, format, signed).to(torch.uint8)
        if format == "dynamic4":
            codes = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
            return cls(format, signed, block_size, values.numel(), codes[:, 0] << 4 | codes[:, 1], scale)
        return cls(format, signed, block_size, values.numel(), codes.view(values.shape), scale)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], format: str, signed: bool, block_size: int) -> Moment:
        """Return the moment of a parameter of this shape before the first step."""
        return cls.of(torch.zeros(shape), format, signed, block_size)

    def codes(self) -> Tensor:
        """Return one code per element, uint8 ``[numel]``."""
        flat = self.state.flatten()
        return optim_reference.unpack_nibbles(flat, self.numel) if self.format == "dynamic4" else flat

    def decode(self) -> Tensor:
        """Return the stored values, float64 ``[numel]``."""
        if self.scale is None:
            return self.state.double().flatten()
        return optim_reference.decode(self.codes(), self.scale, self.format, self.signed, self.block_size)

    def rounding(self, values: Tensor) -> Tensor:
        """Return the max error of storing these float64 values: the distance to the nearest code, or half a step of the
        dtype.

        It includes the error of float32: a value may be a few roundings away from the middle between two codes, and a
        scale is rounded.
        """
        if self.scale is None:
            return ROUNDOFF[self.format] * values.abs() + 2.0**-133
        scale = optim_reference.scales(values, self.format, self.block_size)
        spread = scale.repeat_interleave(self.block_size)[: values.numel()]
        relative = torch.where(spread > 0, values / spread, 0.0)
        codes = optim_reference.nearest_code(relative, self.format, self.signed)
        nearest = optim_reference.code_map(self.format, self.signed)[codes] * spread
        return (
            (nearest - values).abs()
            + 8 * ROUNDOFF["float32"] * (values.abs() + nearest.abs())
            + optim_reference.SMALLEST
        )


def moments_of(rule: str, hyper: Mapping[str, float]) -> dict[str, bool]:
    """Return the moments of a rule in order: name -> whether it can be negative."""
    moments = _C.OPTIM_RULES[rule]["moments"]
    return {name: signed for name, (signed, needs) in moments.items() if needs is None or hyper[needs]}


def run_optim(rule: str, params: list[Tensor], grads: list[Tensor], moments: list[list[Moment]], steps: list[Tensor],
              hyper: Mapping[str, float], *, format: str, block_size: int = 256, row: str | None = None,
              grad_scale: Tensor | None = None,
              found_inf: Tensor | None = None, seed: int | None = None,
              corrections: list[Tensor] | None = None) -> None:  # fmt: skip
    """Run `_C.OptimStep` in place; ``moments[i]`` has moment i of every parameter. Fail if a row other than ``row``
    ran."""
    states = [[moment.state for moment in each] for each in moments]
    scales = [] if format in ("float32", "bfloat16") else [[moment.scale for moment in each] for each in moments]
    previous = _C.force_kernel(row)
    try:
        _C.OptimStep(
            _C.OPTIM_RULES[rule]["number"], _C.STATE_FORMATS[format], block_size,
            params, grads, states, scales, steps, dict(hyper), grad_scale, found_inf, seed, corrections,
        ).run()  # fmt: skip
    finally:
        _C.force_kernel(previous)
    if row is not None and _C.last_kernel("optim_step") != row:
        raise AssertionError(f"asked for row {row}, but {_C.last_kernel('optim_step')} ran")
