"""Balanced streams (`parallel.balance`): ranks that read different samples compute about equally many of their rows.

`Balancer` is what the host asks. This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_streams.balancer import Balancer as Balancer

publish(__name__)
