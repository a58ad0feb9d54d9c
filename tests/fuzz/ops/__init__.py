# SPDX-License-Identifier: Apache-2.0
"""One module per op: ``generate(choices)`` returns the text of a case."""
