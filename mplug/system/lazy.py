"""Public names of a package that are imported when they are first used, because most commands need few of them."""

import re
import sys
from functools import cache
from importlib import import_module
from typing import Any

IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)
"""A line by which a package names a public name and the module that defines it."""


def publish(package: str) -> None:
    """Publish the names that the module `package` imports under TYPE_CHECKING, each as itself on a line of its own.

    The line is `from module import Name as Name`. Type checkers read it; the first use of the attribute `Name` imports
    the module.
    """
    module = sys.modules[package]
    namespace = vars(module)

    @cache
    def names() -> dict[str, str]:
        source = namespace["__spec__"].loader.get_source(package)
        return {name: defining for defining, name in IMPORT.findall(source)}

    def __getattr__(name: str) -> Any:  # noqa: N807 (PEP 562)
        if name == "__all__":
            value: Any = sorted(names())
        elif not name.startswith("__") and name in names():
            value = getattr(import_module(names()[name]), name)
        else:
            raise AttributeError(f"module '{package}' has no attribute '{name}'", name=name, obj=module)
        namespace[name] = value
        return value

    namespace["__getattr__"] = __getattr__
    namespace["__dir__"] = lambda: sorted({*namespace, *names()})
