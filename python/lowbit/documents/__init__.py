# SPDX-License-Identifier: Apache-2.0
"""Files that lowbit writes atomically, and JSON that it wrote: read as declared types, or refused with the position of
the first error."""
