"""What a mistyped command line may have meant. This module imports nothing heavy."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_hints.hints import Hints as Hints

publish(__name__)
