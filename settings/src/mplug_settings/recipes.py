"""Installed recipes: commented config files that distributions bring with their plugins. Imports no plugin.

An entry point NAME of the group 'mplug.recipes' names a package, such as 'mplug_acme.recipes'; the recipe is the file
NAME.yaml of this package. Its section 'recipe' describes it. The other sections are settings of a run.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mplug.config.entry import Entry
from mplug.config.sources import RECIPE, Setting, Settings, merge, read_yaml
from mplug.config.yaml_text import read_text
from mplug.errors import UsageError, listed, suggest
from mplug.registry.entry_points import RECIPES, BrokenPlugin, Registry, refuse_other_versions

DESCRIBED = ("summary", "needs", "reaches")
"""Fields of the section 'recipe' that every installed recipe has."""


@dataclass(frozen=True)
class InstalledRecipe:
    """A recipe: its name as the user types it, its file, and what the file says."""

    name: str
    entry: Entry
    path: Path
    text: str
    settings: Settings

    def described(self, field: str) -> str:
        """A field of the section 'recipe'."""
        return str(self.settings[RECIPE, field].value)

    @property
    def given(self) -> dict[str, str]:
        """The fields that the recipe leaves to the user, each with what to give."""
        return {key[2]: str(setting.value) for key, setting in self.settings.items() if key[:2] == (RECIPE, "give")}


def find_recipe(registry: Registry, word: str) -> InstalledRecipe:
    """The recipe that the user named. UsageError for an unknown name, and for one that two distributions claim."""
    names = registry.names(RECIPES)
    claims = [entry for entry in registry.table(RECIPES) if entry.name == word.rpartition("/")[2]]
    if not claims or ("/" in word and word not in {f"{one.distribution}/{one.name}" for one in claims}):
        remedy = f"; for a file, use --config {word}" if Path(word).is_file() else ""
        raise UsageError(f"no recipe '{word}' is installed{suggest(word, names)} (installed: {listed(names)}){remedy}")
    return read_recipe(registry.find(RECIPES, word), word)


def read_recipe(entry: Entry, word: str) -> InstalledRecipe:
    """Read an installed recipe. BrokenPlugin if its file is missing, is no config, or lacks its description."""
    refuse_other_versions(entry)
    path = _path(entry)
    if path is None or not path.is_file():
        raise _fault(entry, f"there is no file {entry.name}.yaml in '{entry.target}'")
    text = read_text(path)
    try:
        settings = read_yaml(text, f"recipe {word}")
    except UsageError as error:
        raise _fault(entry, str(error)) from error
    missing = [field for field in DESCRIBED if (RECIPE, field) not in settings]
    if missing:
        raise _fault(entry, f"its section '{RECIPE}' lacks {listed(missing)}")
    return InstalledRecipe(word, entry, path, text, settings)


class RecipeSettings:
    """The class of the entry-point group 'mplug.recipe_settings'."""

    def under(self, settings: Settings, registry: Registry, word: str) -> Settings:
        """`settings` of the user over those of a recipe, with the name and the origin of the recipe."""
        recipe = find_recipe(registry, word)
        origin: Settings = {
            (RECIPE, "name"): Setting(recipe.entry.name, "--recipe"),
            (RECIPE, "origin"): Setting(recipe.entry.origin, "--recipe"),
        }
        return merge(merge(recipe.settings, settings), origin)


def _path(entry: Entry) -> Path | None:
    """The file of a recipe. Importing the package would import the plugin."""
    package, *inner = entry.target.split(".")
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((Path(folder, *inner, f"{entry.name}.yaml") for folder in folders), None)


def _fault(entry: Entry, reason: str) -> BrokenPlugin:
    return BrokenPlugin(
        f"the recipe '{entry.name}' ({entry.origin}) is broken: {reason}; report it to the authors of "
        f"{entry.distribution}"
    )
