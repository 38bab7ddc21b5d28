"""Changes of a run while it trains: another layout, without files. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_heal.relayouts import Relayouts as Relayouts

publish(__name__)
