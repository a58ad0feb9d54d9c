# SPDX-License-Identifier: Apache-2.0
"""Collect the kernel rows of other packages, once, when the list of backends is first needed: by an op or a question,
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
    """A package that has an entry point in the group, and its result.

    Attributes:
        name: of the package, as its metadata have it.
        version: of the package.
        entry: its function, ``module:function``.
        rows: that it added, best first.
        info: the result of the function, as text; ``""`` for None.
        reason: why it added nothing; ``""`` if it did.
        failure: the exception that was raised; None if there was none.
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
    """Ask every package once, in the order of their names; an exception of one of them stays in `found`.

    Raises:
        KeyboardInterrupt: the next call goes on with the package that was being asked.
        RuntimeError: with LOWBIT_STRICT=1, a package failed; or a package asked for an op or for rows while it
            added its own.
    """
    global _state
    with _lock:
        if _state == "being filled":
            raise RuntimeError("lowbit.backends: register() runs no op and asks for no row: the list is being made")
        if _state == "empty":
            _state, then = "being filled", "full"
            try:
                for entry in _entries():
                    if all((package.name, package.entry) != (_package(entry)[0], entry.value) for package in found):
                        found.append(_asked(entry))  # else before a fork or Ctrl-C, which cut the filling short
            except KeyboardInterrupt:
                then = "empty"
                raise
            finally:
                _state = then
        failed = [package for package in found if package.failure is not None]
        if failed and os.environ.get("LOWBIT_STRICT") == "1":
            raise RuntimeError(f"lowbit.backends: {failed[0].name} {failed[0].reason}") from failed[0].failure


def normalized(name: str) -> str:
    """Return the name of a package as its index spells it: lowbit_example is lowbit-example."""
    return re.sub(r"[-_.]+", "-", name).lower()


def allowed() -> set[str] | None:
    """Return the packages that LOWBIT_BACKENDS names, or None where it is not set: all are."""
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
    except BaseException as error:  # SystemExit too: a package cannot end the program
        package.failure, package.reason = _kept(error), f"failed: {type(error).__name__}: {error}"
    finally:
        api.close()
    return package


def _kept(error: Exception) -> Exception:
    """The error as `found` keeps it: without frames, which would keep the arguments of the op that came first. With
    LOWBIT_STRICT=1 it will be raised, and has them."""
    link: BaseException | None = None if os.environ.get("LOWBIT_STRICT") == "1" else error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _in_child() -> None:
    """A lock that another thread holds while a process is forked is never released there: begin anew."""
    global _lock, _state
    _lock = threading.RLock()
    if _state == "being filled":
        _state = "empty"


os.register_at_fork(after_in_child=_in_child)
