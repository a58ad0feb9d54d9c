# SPDX-License-Identifier: Apache-2.0
"""The Python side of the ops: one file per op, registration with torch (registration.py), and fake kernels (fakes.py,
or `fake` in the op's file)."""
