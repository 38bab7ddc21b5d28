"""Models that plugins and settings change before a run. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_adapting.adaptations import Adaptations as Adaptations
    from mplug_adapting.hook import adapt as adapt
    from mplug_adapting.patterns import refuse_unmatched as refuse_unmatched

publish(__name__)
