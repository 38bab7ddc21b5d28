"""Runs of several processes. This module imports no torch: a name is imported when it is first used."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_launch.launching import Launching as Launching
    from mplug_launch.supervision import Hang as Hang
    from mplug_launch.supervision import Monitor as Monitor
    from mplug_launch.supervision import PluginMessage as PluginMessage

publish(__name__)
