"""What a word of a command line may mean that is neither an option, nor an assignment, nor a config file."""

import difflib
from pathlib import Path

from mplug.cli.words import YAML
from mplug.errors import brief
from mplug.registry.entry_points import Registry
from mplug.registry.provided import provided

SIMILAR = 0.6
"""Smallest similarity (difflib's ratio) of a file's extension and one of YAML for which both uses are named."""


def word_hint(word: str) -> str:
    """The message for a word that is neither an assignment nor a config file; '' if nothing is known of it."""
    path = Path(word).expanduser()
    if (path / "config.yaml").is_file():
        return f"'{word}' is no option; to begin with the weights of the run '{word}', use --pretrained {word}"
    if path.is_dir() and (found := provided("beginnings")) is not None and found.is_published(path):
        return f"'{word}' is no option; to begin with the weights in '{word}', use --pretrained {word}"
    if path.is_file() and difflib.get_close_matches(path.suffix.lower(), YAML, 1, SIMILAR):
        return f"'{word}' is no option; use --config {word} if it is a config file, or --data {word} to train on it"
    if path.exists():
        return f"'{word}' is no option; to train on the file or folder '{word}', use --data {word}"
    if (Path("runs") / word / "config.yaml").is_file():
        return f"'{brief(word)}' is no option; to name the run '{word}', use --name {word}"
    for kind, option in (("models", "--model"), ("data", "--data"), ("optimizers", "--optimizer")):
        if word in Registry.of_process().names(kind):
            return f"'{word}' is no option; to choose the plugin '{word}', use {option} {word}"
    if word.lower().endswith(".json"):
        return f"'{brief(word)}' is no config file, which is YAML (FILE.yaml)"
    for name in dict.fromkeys((path.name, path.stem)):
        for found in (path.with_name(f"{name}{suffix}") for suffix in YAML):
            if found.is_file():
                return f"there is no file '{brief(word)}'; did you mean '{found}'?"
    return ""
