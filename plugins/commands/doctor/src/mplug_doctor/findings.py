"""What the probes find: facts in sections, and problems with remedies. Private names are taken out at the end."""

import getpass
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and what to do about it."""

    what: str
    remedy: str


@dataclass
class Findings:
    """Facts by section and name, and problems."""

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, section: str, facts: Mapping[str, str]) -> None:
        """Add facts to a section."""
        self.sections.setdefault(section, {}).update(facts)

    def problem(self, what: str, remedy: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(what, remedy))

    def merge(self, other: "Findings") -> None:
        """Add the facts and problems of another probe."""
        for section, facts in other.sections.items():
            self.add(section, facts)
        self.problems += other.problems

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        problems = [{"what": one.what, "remedy": one.remedy} for one in self.problems]
        return {"sections": self.sections, "problems": problems}

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> "Findings":
        """The findings of plain data."""
        problems = [Problem(one["what"], one["remedy"]) for one in data["problems"]]
        return Findings({name: dict(facts) for name, facts in data["sections"].items()}, problems)

    def without_private_names(self) -> "Findings":
        """The same, with words in place of the home folder, this folder, the user and the machine."""
        private = private_names()

        def clean(text: str) -> str:
            for name, word in private.items():
                text = text.replace(name, word)
            return text

        sections = {
            title: {key: clean(value) for key, value in facts.items()} for title, facts in self.sections.items()
        }
        return Findings(sections, [Problem(clean(one.what), clean(one.remedy)) for one in self.problems])

    def text(self) -> str:
        """The report for a terminal or an issue."""
        lines = list[str]()
        for title, facts in self.sections.items():
            lines.append(title)
            for key, value in facts.items():
                first, *more = value.splitlines() or [""]
                lines += [f"  {key}: {first}".rstrip(), *(f"    {line}" for line in more)]
            lines.append("")
        lines += [f"problem: {one.what}; {one.remedy}" for one in self.problems] or ["no problem was found"]
        return "\n".join(lines)


def private_names() -> dict[str, str]:
    """What says who and where the user is, with the word that replaces it, the longest first."""
    found = {str(Path.home()): "~", os.getcwd(): ".", socket.gethostname(): "HOST", socket.getfqdn(): "HOST"}
    found[tempfile.gettempdir()] = "TMP"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = ""
    if len(user) > 2 and user != "root":
        found[user] = "USER"
    usable = {name: word for name, word in found.items() if len(name) > 2 and name != "localhost"}
    return dict(sorted(usable.items(), key=lambda pair: -len(pair[0])))
