# SPDX-License-Identifier: Apache-2.0
"""Diagnostics: the kernel row that runs and why others do not, and facts about this machine and this torch."""
