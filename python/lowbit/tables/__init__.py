# SPDX-License-Identifier: Apache-2.0
"""Printing of lists: tables as text and HTML, in which layers of one kind share a line."""
