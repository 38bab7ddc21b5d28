"""What the tests of whole runs share: the settings of a small one."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_handler_outlives_its_run() -> Iterator[None]:
    """Logs of runs in this process are closed with their test."""
    logger = logging.getLogger("mplug")
    before = list(logger.handlers)
    yield
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def fields(tiny: list[str], text_file: Path) -> list[str]:
    """The tiny run on the small text, as assignments."""
    return [*(word for word in tiny if word != "--set"), f"data.path={text_file}", "schedule.warmup_steps=3"]
