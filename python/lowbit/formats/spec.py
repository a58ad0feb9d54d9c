# SPDX-License-Identifier: Apache-2.0
"""What one quantized linear layer is made of, in words and in the numbers that the ops take.

A spec is the common result of every configuration: quantize_, QuantLinear and the report know nothing else about a format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowbit import _C

OpArgs = tuple[int, int, int, int, bool, int]
"""n, k, format, group_size, asymmetric, x_format: as torch.ops.lowbit.linear takes them."""

PANEL_COLUMNS = 16
LAYOUT_FIELDS = ("version", "format", "n", "k", "group_size", "asymmetric", "x_format")
_X_FORMAT_TEXT = {
    "float": "",
    "int8_group": "int8-activations",
    "int8_row": "int8-activations per row",
    "int8_row_asymmetric": "int8-activations per row asymmetric",
}


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Describe how the weight of a linear layer is stored and how its activations are taken.

    Args:
        format: a name in ``_C.FORMATS``.
        group_size: weights along k that share a scale; 0 is one scale per output channel.
        asymmetric: whether groups have a zero point.
        x_format: a name in ``_C.X_FORMATS``.
        mapping: how scales are chosen, a name in ``_C.MAPPINGS``; used once, when the weight is packed.
    """

    format: str
    group_size: int = 0
    asymmetric: bool = False
    x_format: str = "float"
    mapping: str = "symmetric"

    @property
    def is_float(self) -> bool:
        return not self.format.startswith("int")

    @property
    def name(self) -> str:
        """Short name, such as ``int4 g32 int8-activations``."""
        if self.is_float:
            return self.format
        words = [self.format, f"g{self.group_size}" if self.group_size else "per-channel"]
        words += ["asymmetric"] if self.asymmetric else []
        words += [_X_FORMAT_TEXT[self.x_format]] if self.x_format != "float" else []
        return " ".join(words)

    def op_args(self, n: int, k: int) -> OpArgs:
        """Arguments that follow ``x, weight`` in ``torch.ops.lowbit.linear``."""
        return *self.weight_args(n, k), _C.X_FORMATS[self.x_format]

    def weight_args(self, n: int, k: int) -> tuple[int, int, int, int, bool]:
        """Arguments that follow ``weight`` in ``torch.ops.lowbit.dequantize``."""
        return n, k, _C.FORMATS[self.format], self.group_size, self.asymmetric

    def groups(self, k: int) -> int:
        return -(-k // self.group_size) if self.group_size else 1

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape ``[panels, panel_bytes]`` of the packed uint8 weight."""
        panel_bytes = _C.panel_bytes(_C.FORMATS[self.format], k, self.group_size, self.asymmetric)
        return -(-n // PANEL_COLUMNS), panel_bytes

    def bytes(self, n: int, k: int) -> int:
        """Bytes of the packed weight."""
        panels, panel_bytes = self.shape(n, k)
        return panels * panel_bytes

    def layout(self, n: int, k: int) -> tuple[int, ...]:
        """The numbers, named by ``LAYOUT_FIELDS``, that travel with a packed weight in a state dict."""
        n, k, format, group_size, asymmetric, x_format = self.op_args(n, k)
        return _C.LAYOUT_VERSION, format, n, k, group_size, int(asymmetric), x_format


def describe_layout(layout: Sequence[int]) -> str:
    """Say in words what a ``layout`` holds, also one of an unknown version."""
    if len(layout) != len(LAYOUT_FIELDS):
        return f"a layout of {len(layout)} numbers"
    version, format, n, k, group_size, asymmetric, x_format = layout
    if version != _C.LAYOUT_VERSION:
        return f"layout version {version}"
    formats = {number: name for name, number in _C.FORMATS.items()}
    x_formats = {number: name for name, number in _C.X_FORMATS.items()}
    if format not in formats or x_format not in x_formats:
        return f"format {format} with x_format {x_format}"
    spec = LinearSpec(formats[format], group_size, bool(asymmetric), x_formats[x_format])
    return f"{spec.name} of n={n} k={k}"
