# SPDX-License-Identifier: Apache-2.0
"""Files that lowbit writes, each as a whole, and JSON that it wrote: read as declared types, or refused with the place
of the first fault."""
