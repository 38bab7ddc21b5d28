"""Which plugin failed, and what a loader yields that breaks its contract. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_faults.blame import cause_of as cause_of
    from mplug_faults.blame import failed_part as failed_part
    from mplug_faults.blame import plugin_error as plugin_error
    from mplug_faults.finder import Faults as Faults
    from mplug_faults.micro_batch_checks import malformed as malformed
    from mplug_faults.micro_batch_checks import out_of_range as out_of_range
    from mplug_faults.supervised_loader import Supervised as Supervised

publish(__name__)
