"""What the main thread of a process does at a moment, for plugins that observe its progress."""

from dataclasses import dataclass
from types import CodeType
from typing import ClassVar

READING: set[CodeType] = set()
"""The code of functions that wait for a data loader. If a main thread runs one of them, it waits for its data."""


@dataclass(frozen=True)
class Activity:
    """The current activity of the main thread of a process (`Run.activity`).

    `name` is one of the constants below, for the activities that a run repeats. Otherwise it is the phrase by which
    messages name the activity: 'building the model'.
    """

    STEP: ClassVar[str] = "step"
    EVALUATION: ClassVar[str] = "evaluation"
    SAVING: ClassVar[str] = "saving"
    WRITING: ClassVar[str] = "waiting until a checkpoint is written"
    """The wait for an asynchronous write. Its duration depends on the storage."""
    RELAYOUT: ClassVar[str] = "changing the layout"
    """A change of the layout while the run trains. Steps and saves have other durations after it."""
    COPYING: ClassVar[str] = "copying the state"
    """The copy of the state into the memory of other processes (`Healer.keep`)."""
    PHRASES: ClassVar[dict[str, str]] = {
        STEP: "in step {}",
        EVALUATION: "in the evaluation after step {}",
        SAVING: "saving step {}",
    }
    """The activities that a run repeats, and the phrases by which messages name them."""

    name: str = "starting"
    step: int = 0
    number: int = 0
    """How many activities began before this one. All ranks of a run begin the same ones in the same order."""

    @property
    def phrase(self) -> str:
        """The activity as a message names it: 'in step 12', 'building the model'."""
        return self.PHRASES.get(self.name, self.name).format(self.step)
