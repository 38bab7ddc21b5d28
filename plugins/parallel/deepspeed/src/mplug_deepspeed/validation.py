"""Lets DeepSpeed check a user's file before a process starts: misspelt fields, values of the wrong type."""

import os
from typing import TYPE_CHECKING

from mplug import UsageError
from mplug_deepspeed.rules import AXIS

if TYPE_CHECKING:
    from mplug import Run
    from mplug_deepspeed.settings import Settings


def refuse_invalid(run: "Run", settings: "Settings") -> None:
    """Raise UsageError with DeepSpeed's own reasons if it does not accept the file, completed by the run's settings."""
    os.environ.setdefault("DS_ACCELERATOR", run.device)
    import logging

    from deepspeed.runtime.config import DeepSpeedConfig  # takes seconds
    from deepspeed.utils import logger
    from pydantic import ValidationError

    logger.setLevel(logging.ERROR)
    try:
        DeepSpeedConfig(settings.effective(run, ranks=1))
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, one['loc'])) or error.title}: {one['msg']}" for one in error.errors()]
        raise _refused(settings, "; ".join(reasons)) from error
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise _refused(settings, str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _refused(settings: "Settings", reason: str) -> UsageError:
    return UsageError(f"parallel.{AXIS}.config: DeepSpeed does not accept '{settings.config.config}': {reason}")
