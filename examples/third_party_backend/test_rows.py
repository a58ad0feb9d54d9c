# SPDX-License-Identifier: Apache-2.0
"""Every row of this package against float64: `pytest test_rows.py` where it is installed."""

from lowbit.devices import simulated
from lowbit.testing import backend_suite

simulated.enable()  # for the row of the simulated device

TestCpu = backend_suite("cpu", by="lowbit-example")
TestSimulated = backend_suite("lowbit_sim", by="lowbit-example")
