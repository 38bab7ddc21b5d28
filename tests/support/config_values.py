"""Values of the fields of config.json files: those of published folders, rare ones, and fields of other libraries."""

from pathlib import Path
from typing import Any

import yaml

Fields = dict[str, Any]
Pool = list[Any]

_VALUES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
USUAL: dict[str, Pool] = _VALUES["usual"]
RARE: dict[str, Pool] = _VALUES["rare"]
NEUTRAL: Fields = _VALUES["neutral"]
FOREIGN: Fields = _VALUES["foreign"]
