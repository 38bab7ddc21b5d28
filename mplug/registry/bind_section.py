"""Bind values to a section of the host, a plugin or a tokenizer."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from mplug.config.problems import Problem, booleans_as_numbers, problems_of
from mplug.config.ranges import integers_out_of_range, out_of_range
from mplug.registry.asking import fault


def bind(model: type[BaseModel], values: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """The bound section and an empty list; or None and all problems of the values."""
    problems = [Problem(path, message) for path, message in integers_out_of_range(values)]
    if problems:  # validators of the section may compute with these integers
        return None, problems
    try:
        config = model.model_validate(dict(values))
    except ValidationError as error:
        return None, problems_of(error, model, values)
    except Exception as error:
        return None, [Problem((), f"a validator of the section failed: {fault(error)}", is_fault=True)]
    checks = (*booleans_as_numbers(values, config), *out_of_range(config))
    problems = [Problem(path, message) for path, message in checks]
    return (None if problems else config), problems
