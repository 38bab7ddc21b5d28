"""Settings of a run: shown, described for editors, or taken from an installed recipe. This module imports no torch."""

from typing import TYPE_CHECKING

from mplug.system.lazy import publish

if TYPE_CHECKING:
    from mplug_settings.json_schema import config_schema as config_schema
    from mplug_settings.recipes import InstalledRecipe as InstalledRecipe
    from mplug_settings.recipes import RecipeSettings as RecipeSettings
    from mplug_settings.recipes import find_recipe as find_recipe

publish(__name__)
