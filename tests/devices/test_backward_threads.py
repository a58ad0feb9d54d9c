# SPDX-License-Identifier: Apache-2.0
"""The wait for torch's threads at the end of a process, on a thread that has their name."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator

import pytest

from lowbit.devices.private_use import backward_threads

Work = Callable[[], None]


@pytest.fixture
def started() -> Iterator[Callable[[Work], None]]:
    """Starts a thread that is named as torch's are, does the work that is given and sleeps."""
    end = threading.Event()
    threads = []

    def start(work: Work) -> None:
        named = threading.Event()

        def run() -> None:
            PR_SET_NAME = 15
            ctypes.CDLL(None).prctl(PR_SET_NAME, b"pt_autograd_7", 0, 0, 0)
            named.set()
            work()
            end.wait()

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        named.wait()

    yield start
    end.set()
    for thread in threads:
        thread.join()


def test_a_thread_that_computes_is_waited_for(started: Callable[[Work], None]) -> None:
    done = []

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # some 0.3 s without the interpreter's lock
        done.append(True)

    started(work)
    assert not done
    assert backward_threads.wait(60)
    assert done


def test_a_thread_that_does_not_end_is_waited_for_so_long(started: Callable[[Work], None]) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1000)

    started(work)
    try:
        assert not backward_threads.wait(0.1)
    finally:
        stop.set()
