"""Streams of a model, and what ranks exchange of samples.

`Processor` makes the rows of streams from the media of samples (`Medium`).
`Balancer` (`parallel.balance`): ranks that read different samples compute about equally many rows of their streams.
`Sharing` (`parallel.read_once`): one rank reads the samples of several. `Division`: the rows of streams that each rank
computes, and how unequal the work of ranks is. They are what the host asks.

This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_streams.balancer import Balancer as Balancer
    from mplug_streams.division import Division as Division
    from mplug_streams.media import Medium as Medium
    from mplug_streams.media import Processor as Processor
    from mplug_streams.media import Seen as Seen
    from mplug_streams.rows import own_rows as own_rows
    from mplug_streams.sharing import Sharing as Sharing

publish(__name__)
