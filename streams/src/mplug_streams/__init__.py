"""What ranks exchange of samples: the rows of streams (`parallel.balance`), and samples that one rank reads for several.

`Balancer` and `Sharing` (`parallel.read_once`) are what the host asks. This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_streams.balancer import Balancer as Balancer
    from mplug_streams.sharing import Sharing as Sharing

publish(__name__)
