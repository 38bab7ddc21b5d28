"""A pytest plugin for `mplug plugins test --fast`: of mplug's suites, it keeps the tests of `mplug plugins check`."""

from typing import Any

from mplug_testing.suite import PluginSuite


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselect the tests of suites that take long; tests that the author has written stay."""
    slow = [item for item in items if _is_slow(item)]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


def _is_slow(item: Any) -> bool:
    owner, function = getattr(item, "cls", None), getattr(item, "function", None)
    is_of_suite = isinstance(owner, type) and issubclass(owner, PluginSuite)
    is_own = is_of_suite and item.originalname in vars(owner)
    return is_of_suite and not is_own and not getattr(function, "smoke", False)
