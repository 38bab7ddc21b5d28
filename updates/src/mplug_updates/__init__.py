"""Updates of weights with more than one optimizer of all pieces: groups, averages, offloaded states, first weights.

This module imports no torch: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_updates.torch_optimizer import TorchOptimizer as TorchOptimizer
    from mplug_updates.updates import Updates as Updates
    from mplug_updates.widths import width_rates as width_rates

publish(__name__)
