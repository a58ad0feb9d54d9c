# SPDX-License-Identifier: Apache-2.0
"""How lists print: tables as text and HTML, and layers of one kind as one line."""
