# SPDX-License-Identifier: Apache-2.0
"""The description of a quantized linear layer: by names, and by the numbers that the ops take.

Every configuration produces a spec. It is all that quantize_, QuantLinear and the report know about a format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowbit import _C
from lowbit.formats.algorithms import GPTQ, Algorithm
from lowbit.ops.linear import LinearArgs

LAYOUT_FIELDS = ("version", "format", "n", "k", "group_size", "asymmetric", "x_format", "layout", "experts")
"""Names of the numbers that are stored next to a packed weight in a state dict. Version 1 ends before ``layout``, which
was always x86-panel-16x64. Version 2 ends before ``experts`` and describes one matrix. Version 3 describes ``experts``
matrices."""
LAYOUT_VERSION = 3
_FIELDS_OF = {1: 7, 2: 8, LAYOUT_VERSION: 9}
_X_FORMAT_TEXT = {
    "float": "",
    "int8_group": "int8-activations",
    "int8_row": "int8-activations per row",
    "int8_row_asymmetric": "int8-activations per row asymmetric",
    "float8_row": "float8-activations per row",
}


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """How the weight of a linear layer is stored, and how its activations are rounded.

    Args:
        format: a name in ``_C.FORMATS``.
        group_size: number of weights along k that share a scale; 0 is one scale per output channel.
        asymmetric: whether groups have a zero point.
        x_format: the rounding of activations, a name in ``_C.X_FORMATS``.
        mapping: the rule that computes a scale from a group's range, a name in ``_C.MAPPINGS``.
        scale: a name in ``_C.SCALE_CHOICES``: "absmax" uses that scale, "search" the one with the smallest error. None
            is "search" for integer formats of up to 4 bits, unless the mapping is "symmetric_no_clipping_err", since a
            searched scale may clip; otherwise it is "absmax".
        algorithm: how codes are chosen; None is the nearest code.

    The last three are used only when the weight is packed.
    """

    format: str
    group_size: int = 0
    asymmetric: bool = False
    x_format: str = "float"
    mapping: str = "symmetric"
    scale: str | None = None
    algorithm: Algorithm | None = None

    def __post_init__(self) -> None:
        if self.scale is None:
            facts = _C.FORMAT_FACTS[self.format]
            searched = facts["kind"] == "integer" and facts["bits"] <= 4 and self.mapping != "symmetric_no_clipping_err"
            object.__setattr__(self, "scale", "search" if searched else "absmax")

    @property
    def is_float(self) -> bool:
        return _C.FORMAT_FACTS[self.format]["kind"] == "float"

    @property
    def takes_absmax(self) -> bool:
        """Whether scales follow from the groups' ranges and codes are the nearest ones."""
        return self.scale == "absmax" and self.algorithm is None

    @property
    def weighs_inputs(self) -> bool:
        """Whether the codes depend on a calibration, if there is one: scales are searched, or the algorithm is GPTQ."""
        return isinstance(self.algorithm, GPTQ) or (self.algorithm is None and self.scale == "search")

    def with_gptq(self, algorithm: GPTQ) -> LinearSpec:
        """Return the spec with codes by this algorithm, if its scales are searched and it names no algorithm yet."""
        can = self.scale == "search" and self.algorithm is None
        return replace(self, algorithm=algorithm) if can else self

    @property
    def name(self) -> str:
        """A short name, such as ``int4 g32 int8-activations``."""
        if self.is_float:
            return self.format
        words = [self.format, f"g{self.group_size}" if self.group_size else "per-channel"]
        words += ["asymmetric"] if self.asymmetric else []
        words += [_X_FORMAT_TEXT[self.x_format]] if self.x_format != "float" else []
        return " ".join(words)

    def op_args(self, n: int, k: int) -> LinearArgs:
        """Return the arguments that follow ``x, weight`` in ``torch.ops.lowbit.linear``."""
        return *self.weight_args(n, k), _C.X_FORMATS[self.x_format]

    def weight_args(self, n: int, k: int) -> tuple[int, int, int, int, bool]:
        """Return the arguments that follow ``weight`` in ``torch.ops.lowbit.dequantize``."""
        return n, k, _C.FORMATS[self.format], self.group_size, self.asymmetric

    @property
    def fake_quantize_args(self) -> tuple[int, int, int]:
        """The arguments that follow ``weight`` in ``torch.ops.lowbit.fake_quantize``."""
        return _C.FORMATS[self.format], self.group_size, _C.MAPPINGS[self.mapping]

    def groups(self, k: int) -> int:
        return -(-k // self.group_size) if self.group_size else 1

    def shape(self, n: int, k: int, layout: str = _C.LAYOUT) -> tuple[int, int]:
        """Return the shape of the packed uint8 weight; in the layout of the kernels, ``[panels, panel_bytes]``."""
        return _C.packed_shape(_C.LAYOUTS[layout], *self.weight_args(n, k))

    def bytes(self, n: int, k: int) -> int:
        """Return the size of the packed weight in bytes."""
        panels, panel_bytes = self.shape(n, k)
        return panels * panel_bytes

    def layout(self, n: int, k: int, layout: str = _C.LAYOUT) -> tuple[int, ...]:
        """Return the numbers, named by ``LAYOUT_FIELDS``, that describe a packed matrix in a state dict."""
        return StoredWeight(self, n, k, layout).numbers


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The format, size and layout of a packed weight.

    Args:
        spec: how the weight is stored. If it was read from a state dict, how scales and codes were chosen is unknown.
        n, k: rows and columns of the matrix.
        layout: a name in ``_C.LAYOUTS``.
        experts: number of matrices in a weight of several matrices ``[n, k]``; None for a single matrix.
    """

    spec: LinearSpec
    n: int
    k: int
    layout: str
    experts: int | None = None

    @classmethod
    def read(cls, numbers: Sequence[int]) -> StoredWeight:
        """Return the description that `numbers` was computed from; versions 1 and 2 are read too.

        Raises:
            ValueError: the version, the layout or the format is unknown; the message names it.
        """
        version = numbers[0] if numbers else 0
        if numbers and version not in _FIELDS_OF:
            raise ValueError(f"layout version {version}, known are 1 to {LAYOUT_VERSION}")
        if len(numbers) != _FIELDS_OF.get(version):
            raise ValueError(f"a layout of {len(numbers)} numbers")
        _, format, n, k, group_size, asymmetric, x_format, layout, *experts = (*numbers, 0) if version == 1 else numbers
        if not 0 <= layout < len(_C.LAYOUTS):
            known = ", ".join(f"{number} {name}" for name, number in _C.LAYOUTS.items())
            raise ValueError(f"layout {layout}, known are {known}")
        if not (0 <= format < len(_C.FORMATS) and 0 <= x_format < len(_C.X_FORMATS)):
            raise ValueError(f"format {format} with x_format {x_format}")
        mapping = "asymmetric" if asymmetric else "symmetric"
        spec = LinearSpec([*_C.FORMATS][format], group_size, bool(asymmetric), [*_C.X_FORMATS][x_format], mapping)
        return cls(spec, n, k, [*_C.LAYOUTS][layout], *experts)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that are stored next to the weight in a state dict, named by ``LAYOUT_FIELDS``."""
        n, k, format, group_size, asymmetric, x_format = self.spec.op_args(self.n, self.k)
        described = format, n, k, group_size, int(asymmetric), x_format, _C.LAYOUTS[self.layout]
        if self.experts is None:
            return 2, *described  # for releases of lowbit that cannot read version 3
        return LAYOUT_VERSION, *described, self.experts

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the packed uint8 weight: ``[panels, panel_bytes]``, or ``[experts, panels, panel_bytes]``."""
        front = () if self.experts is None else (self.experts,)
        return *front, *self.spec.shape(self.n, self.k, self.layout)

    def in_layout(self, layout: str) -> StoredWeight:
        """Return the description of the same weight in another layout."""
        return replace(self, layout=layout)

    def is_as(self, other: StoredWeight) -> bool:
        """Return whether format and size are equal. Layouts may differ, and so may the way scales were chosen."""
        mine, theirs = (stored.spec.op_args(stored.n, stored.k) for stored in (self, other))
        return mine == theirs and self.experts == other.experts

    def __str__(self) -> str:
        layout = f" in {self.layout}" if self.layout != _C.LAYOUT else ""
        return f"{self.spec.name} of {size_text(self.n, self.k, self.experts)}{layout}"


def size_text(n: int, k: int, experts: int | None) -> str:
    """Return the size of a weight as text for error messages."""
    return f"{experts} matrices of n={n} k={k}" if experts is not None else f"n={n} k={k}"
