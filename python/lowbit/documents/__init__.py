# SPDX-License-Identifier: Apache-2.0
"""Files that lowbit writes atomically, and JSON files that it reads as declared types, with errors that give the
position of the first mistake."""
