"""Problems of the fields of a config."""

from dataclasses import dataclass

from pydantic import ValidationError

NO_SECTION = "must be a section (a mapping of fields)"


@dataclass(frozen=True)
class Problem:
    """A problem of a field: the steps from the section to the field, and the message.

    `is_fault` means that a validator of the section raised an exception that does not refuse a value.
    """

    path: tuple[str, ...]
    message: str
    is_fault: bool = False

    @property
    def sentence(self) -> str:
        """The field and the message; the message alone if it is about several fields."""
        return f"{'.'.join(self.path)}: {self.message}" if self.path else self.message


def stated_problems(error: ValidationError) -> list[Problem]:
    """Every problem of a section, in the words of pydantic."""
    stated = error.errors(include_url=False)
    return [Problem(tuple(map(str, one["loc"])), " ".join(one["msg"].split())) for one in stated]
