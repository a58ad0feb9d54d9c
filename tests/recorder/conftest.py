# SPDX-License-Identifier: Apache-2.0
"""The recorder of the process that runs the tests is on, which it stays for the tests after these."""

from __future__ import annotations

import pytest

from lowbit import recorder


@pytest.fixture(autouse=True, scope="session")
def recording() -> None:
    recorder.start()
