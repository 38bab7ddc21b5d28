"""Whole matrices, and sums over them, of which several ranks hold parts: what `mplug.Assembler` returns.

This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_matrices.assembling import Assembling as Assembling
    from mplug_matrices.blocks import Block as Block
    from mplug_matrices.matrices import Matrices as Matrices
    from mplug_matrices.sums import BlockPart as BlockPart
    from mplug_matrices.sums import Sums as Sums

publish(__name__)
