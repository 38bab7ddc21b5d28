"""Changes of a run while it trains: another layout, the death of a process or machine. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_heal.healing import Heal as Heal
    from mplug_heal.local import LocalCheckpoints as LocalCheckpoints
    from mplug_heal.relayouts import Relayouts as Relayouts
    from mplug_heal.save_times import OptimalSaves as OptimalSaves

publish(__name__)
