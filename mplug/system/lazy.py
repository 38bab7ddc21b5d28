"""Public names of a package that are imported when they are first used, because most commands need few of them."""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def publish(package: str, names: Mapping[str, tuple[str, ...]]) -> None:
    """Publish names of other modules in the module `package`; `names` maps each defining module to its names.

    The first use of an attribute imports the module that defines it. Type checkers cannot see the attributes, so the
    caller imports them under TYPE_CHECKING too, each as itself (`from module import Name as Name`).
    """
    modules = {name: module for module, defined in names.items() for name in defined}
    namespace = vars(sys.modules[package])

    def __getattr__(name: str) -> Any:  # noqa: N807 (PEP 562)
        if name not in modules:
            message = f"module '{package}' has no attribute '{name}'"
            raise AttributeError(message, name=name, obj=sys.modules[package])
        value = namespace[name] = getattr(import_module(modules[name]), name)
        return value

    namespace["__getattr__"] = __getattr__
    namespace["__dir__"] = lambda: sorted({*namespace, *modules})
    namespace["__all__"] = sorted(modules)
