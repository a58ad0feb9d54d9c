# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from twins import CASES, Case


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param
