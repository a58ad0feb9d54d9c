# SPDX-License-Identifier: Apache-2.0
"""Score programs: the flat list of integers that the kernels run in place of a ``score_mod`` or ``mask_mod``.

The ops, with their numbers and types, are those of csrc/score/ops.hpp (``_C.SCORE_OPS``). Layout of the list::

    VERSION, captured_count, (type, rank) * captured_count, output, instruction*
    instruction = opcode, operand*                 operands are numbers of earlier instructions, counted from 0
                | float_const, bits of a float64 | int_const, value | bool_const, 0 or 1
                | gather, captured tensor, index * rank

Example:
    >>> program = ProgramBuilder()
    >>> distance = program.op("sub", program.op("k"), program.op("q"))
    >>> program.finish(program.op("add", program.op("score"), program.convert(distance, "float")))[:4]
    [1, 0, 4, 4]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lowbit import _C

VERSION = 1
TYPES = ("float", "int", "bool")
_LETTERS = {"f": "float", "i": "int", "b": "bool"}
_CONVERSIONS = {
    ("int", "float"): "int_to_float",
    ("bool", "float"): "bool_to_float",
    ("bool", "int"): "bool_to_int",
    ("float", "int"): "float_to_int",
    ("float", "bool"): "float_to_bool",
    ("int", "bool"): "int_to_bool",
}


class UnknownOp(Exception):
    """Something that a score program cannot express."""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a program: its number and its type (float, int or bool)."""

    number: int
    type: str


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured tensor: its number, the type as which its elements are read, and its number of dimensions."""

    number: int
    type: str
    rank: int


class ProgramBuilder:
    """Collects the instructions of one program. Equal instructions become one value."""

    def __init__(self) -> None:
        self._code: list[int] = []
        self._values: dict[tuple[int, ...], Value] = {}
        self._captured: list[Captured] = []

    def captured(self, type: str, rank: int) -> Captured:
        """Declare the next captured tensor: ``float`` (any float dtype), ``int`` (int32, int64) or ``bool``, with
        ``rank`` dimensions."""
        if type not in TYPES:
            raise ValueError(f"captured: type must be one of {', '.join(TYPES)}, got {type!r}")
        self._captured.append(Captured(len(self._captured), type, rank))
        return self._captured[-1]

    def constant(self, value: float | int | bool) -> Value:
        """Return a constant with the type of the Python value."""
        if isinstance(value, bool):
            return self._emit("bool", _C.SCORE_OPS["bool_const"][0], int(value))
        if isinstance(value, int):
            return self._emit("int", _C.SCORE_OPS["int_const"][0], value)
        return self._emit("float", _C.SCORE_OPS["float_const"][0], struct.unpack("<q", struct.pack("<d", value))[0])

    def op(self, name: str, *operands: Value) -> Value:
        """Apply an op, or its variant for the operands' types: ``add`` of ints is ``add_int``, ``where`` of bools is
        ``where_bool``."""
        types = "".join(value.type[0] for value in operands)
        for variant in (name, f"{name}_int", f"{name}_bool"):
            opcode, signature = _C.SCORE_OPS.get(variant, (-1, ""))
            wanted, _, result = signature.partition(">")
            if result in _LETTERS and wanted == types:
                return self._emit(_LETTERS[result], opcode, *(value.number for value in operands))
        raise TypeError(f"op: no score op {name} takes ({', '.join(value.type for value in operands)})")

    def convert(self, value: Value, type: str) -> Value:
        """Return the value as ``type``. Float to int rounds toward zero, bool is ``!= 0``."""
        return value if value.type == type else self.op(_CONVERSIONS[value.type, type], value)

    def gather(self, tensor: Captured, *indices: Value) -> Value:
        """Return ``tensor[indices]``, with one int per dimension; negative ones count from the end."""
        if len(indices) != tensor.rank or any(index.type != "int" for index in indices):
            raise TypeError(
                f"gather: a tensor of {tensor.rank} dimensions needs as many ints, got "
                f"{[index.type for index in indices]}"
            )
        return self._emit(tensor.type, _C.SCORE_OPS["gather"][0], tensor.number, *(index.number for index in indices))

    def finish(self, output: Value) -> list[int]:
        """Return the code. ``output`` is the modified score (float) or the mask (bool)."""
        tensors = [field for tensor in self._captured for field in (TYPES.index(tensor.type), tensor.rank)]
        return [VERSION, len(self._captured), *tensors, output.number, *self._code]

    def _emit(self, type: str, *instruction: int) -> Value:
        value = self._values.get(instruction)
        if value is None:
            value = self._values[instruction] = Value(len(self._values), type)
            self._code += instruction
        return value
