# SPDX-License-Identifier: Apache-2.0
"""Collect the kernel rows of other packages, once, when the list of backends is first needed: by an op or a query,
never by an import. csrc/bindings/external.cpp calls `fill`."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from lowbit.backends.api import Api

GROUP, ALLOWED = "lowbit.backends", "LOWBIT_BACKENDS"


@dataclass(slots=True)
class Found:
    """A package with an entry point in the group, and its result.

    Attributes:
        name: the name of the package, from its metadata.
        version: the version of the package.
        entry: its function, ``module:function``.
        rows: the rows that it added, best first.
        info: the result of the function as text; ``""`` for None.
        reason: why it added nothing; ``""`` if it did.
        failure: the exception that it raised, or None.
    """

    name: str
    version: str
    entry: str
    rows: tuple[str, ...] = ()
    info: str = ""
    reason: str = ""
    failure: BaseException | None = None


found: list[Found] = []
_lock = threading.RLock()
_state = "empty"  # then "being filled", "full"


def fill() -> None:
    """Call the entry point of every package once, in the order of their names. An exception is stored in `found`.

    Raises:
        KeyboardInterrupt: the call was interrupted; the next one resumes with the same package.
        RuntimeError: a package failed and LOWBIT_STRICT=1, or a package called an op or asked for rows while it added
            its own.
    """
    global _state
    with _lock:
        if _state == "being filled":
            raise RuntimeError(
                "lowbit.backends: register() must not run an op or ask for kernel rows: their list is still being made"
            )
        if _state == "empty":
            _state, then = "being filled", "full"
            try:
                for entry in _entries():
                    if all((package.name, package.entry) != (_package(entry)[0], entry.value) for package in found):
                        # The others were called before a fork or Ctrl-C interrupted this loop.
                        found.append(_asked(entry))
            except KeyboardInterrupt:
                then = "empty"
                raise
            finally:
                _state = then
        failed = [package for package in found if package.failure is not None]
        if failed and os.environ.get("LOWBIT_STRICT") == "1":
            raise RuntimeError(f"lowbit.backends: {failed[0].name} {failed[0].reason}") from failed[0].failure


def normalized(name: str) -> str:
    """Return the name of a package as package indexes normalize it: lowbit_example is lowbit-example."""
    return re.sub(r"[-_.]+", "-", name).lower()


def allowed() -> set[str] | None:
    """Return the packages that LOWBIT_BACKENDS names, or None if it is not set, which allows all."""
    names = os.environ.get(ALLOWED)
    return None if names is None else {normalized(name.strip()) for name in names.split(",") if name.strip()}


def _entries() -> Iterator[metadata.EntryPoint]:
    only = allowed()
    if only is None or only:
        entries = metadata.entry_points(group=GROUP)
        yield from sorted(entries, key=lambda entry: (normalized(_package(entry)[0]), entry.name))


def _package(entry: metadata.EntryPoint) -> tuple[str, str]:
    return (entry.dist.name, entry.dist.version) if entry.dist else (entry.name, "")


def _asked(entry: metadata.EntryPoint) -> Found:
    name, version = _package(entry)
    package, only = Found(name, version, entry.value), allowed()
    if only is not None and normalized(name) not in only:
        package.reason = f"{ALLOWED} does not name it"
        return package
    api = Api(name)
    try:
        info = entry.load()(api)
        package.info = "" if info is None else str(info)
        api.commit()
        package.rows = tuple(api.names)
        if not package.rows:
            package.reason = "it added nothing"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # including SystemExit, so that a package cannot end the program
        package.failure, package.reason = _kept(error), f"failed: {type(error).__name__}: {error}"
    finally:
        api.close()
    return package


def _kept(error: Exception) -> Exception:
    """Return the error without its frames, which would keep the arguments of the first op alive. With LOWBIT_STRICT=1
    it keeps them, because it will be raised."""
    link: BaseException | None = None if os.environ.get("LOWBIT_STRICT") == "1" else error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _in_child() -> None:
    """Reset the lock after a fork: if another thread held it, nobody would release it in the child."""
    global _lock, _state
    _lock = threading.RLock()
    if _state == "being filled":
        _state = "empty"


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_in_child)
