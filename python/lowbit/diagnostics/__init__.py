# SPDX-License-Identifier: Apache-2.0
"""Diagnostics: the kernel row that runs and why the others do not; facts about this machine and this torch."""
