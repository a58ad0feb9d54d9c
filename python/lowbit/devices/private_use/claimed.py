# SPDX-License-Identifier: Apache-2.0
"""The device of ours that torch has in this process, in one place."""

from __future__ import annotations

name = ""
"""As torch shows it; empty until `registration.register`, which is called once."""
