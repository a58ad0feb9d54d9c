# SPDX-License-Identifier: Apache-2.0
"""errors_of: any error that a damaged file makes other code raise becomes a ValueError with the file's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def errors_of(path: str | Path, what: str) -> Iterator[None]:
    """Give errors of the block the name of the file, and say what of it was read.

    Raises:
        ValueError: the block raised something else than a ValueError or an OSError that names the file already.
    """
    try:
        yield
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # keys of any type and size go through third-party code: KeyError, IndexError ...
        if isinstance(error, (ValueError, OSError)) and Path(path).name in str(error):
            raise
        told = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: {what} cannot be read: {told}") from error
