"""Another layout while a run trains, without files, and how often a run saves. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_heal.relayouts import Relayouts as Relayouts
    from mplug_heal.save_times import OptimalSaves as OptimalSaves

publish(__name__)
