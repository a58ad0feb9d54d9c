# SPDX-License-Identifier: Apache-2.0
"""errors_of: turn any error that a damaged file causes in other code into a ValueError with the file's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def errors_of(path: str | Path, what: str) -> Iterator[None]:
    """Add the name of the file, and what was being read, to errors raised in the block.

    Raises:
        ValueError: the block raised an error that does not name the file. MemoryError and ImportError are passed on.
    """
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # third-party code may raise KeyError, IndexError ... on damaged values
        if isinstance(error, (ValueError, OSError)) and Path(path).name in str(error):
            raise
        told = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: {what} cannot be read: {told}") from error
