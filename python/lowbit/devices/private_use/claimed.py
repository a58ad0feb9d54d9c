# SPDX-License-Identifier: Apache-2.0
"""The device that lowbit has added to torch in this process."""

from __future__ import annotations

name = ""
"""Its name in torch. It is empty until `registration.register`, which is called at most once."""
