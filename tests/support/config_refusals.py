"""Why mplug refuses config.json files that transformers reads: the rules of config_refusals.yaml."""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Rule:
    """A kind of refusal; its fields are described in the file."""

    what: str
    pattern: str
    computable: str = ""


RULES = [Rule(**row) for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())]


def rule_of(kind: str, reason: str) -> Rule | None:
    """The rule for a refusal of a `model_type`."""
    return next((rule for rule in RULES if re.search(rule.pattern, f"{kind}: {reason}")), None)
