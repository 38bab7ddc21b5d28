"""Runs of several processes. This module imports no torch: a name is imported when it is first used."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_launch.launching import Launching as Launching

publish(__name__)
