# SPDX-License-Identifier: Apache-2.0
"""Which device of ours torch has in this process, in one place."""

from __future__ import annotations

name = ""
"""As torch shows it; empty until `registration.register`, which is called once."""
