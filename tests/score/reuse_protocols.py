# SPDX-License-Identifier: Apache-2.0
"""An object that answers each of Python's protocols from a state that no attribute's name says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


def number() -> float:
    return round(random.uniform(0.5, 2.0), 3)


class Protocols:
    def __init__(self) -> None:
        self.values = [number(), number()]

    def __getitem__(self, index: int) -> float:
        return self.values[index]

    def __float__(self) -> float:
        return self.values[0]

    def __int__(self) -> int:
        return int(self.values[0] * 10)

    def __index__(self) -> int:
        return int(self.values[0] * 10)

    def __len__(self) -> int:
        return int(self.values[0] * 10)

    def __bool__(self) -> bool:
        return self.values[0] > 2.5

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)

    def __contains__(self, value: float) -> bool:
        return value in self.values

    def __eq__(self, other: object) -> bool:
        return self.values[0] > 2.5

    __hash__ = None  # type: ignore[assignment]

    def __lt__(self, other: object) -> bool:
        return self.values[0] > 2.5

    def __rmul__(self, other: Any) -> Any:
        return other * self.values[0]

    def __enter__(self) -> float:
        return self.values[0]

    def __exit__(self, *error: object) -> None:
        return None

    def __getattr__(self, name: str) -> float:
        return self.__dict__["values"][len(name) % 2]
