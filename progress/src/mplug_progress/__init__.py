"""The progress of a run on the console. This module imports no torch: a name is imported when it is first used."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_progress.progress_line import ProgressLine as ProgressLine
    from mplug_progress.shown import Shown as Shown

publish(__name__)
