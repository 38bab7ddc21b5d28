"""What an entry point may name in the place of a plugin's class."""

from abc import ABC, abstractmethod
from typing import Any


class MadePlugin(ABC):
    """An object from which the host makes a plugin's class when it loads the plugin."""

    @property
    @abstractmethod
    def plugin(self) -> type[Any]:
        """The class of the plugin; the same at each call."""
