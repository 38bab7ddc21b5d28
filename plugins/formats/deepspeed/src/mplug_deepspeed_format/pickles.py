"""Read the pickles of a checkpoint without running code from them: tensors, containers, numbers and texts only."""

import argparse
import pickle
from pathlib import Path
from typing import Any

import torch

from mplug import RunError, UsageError


class Address:
    """What stands for DeepSpeed's `fragment_address`: `start` and `numel` of a parameter's part of a partition."""

    start: int
    numel: int


class Inert:
    """What stands for an object of DeepSpeed whose content an import does not need."""


KNOWN: list[Any] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Address, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Inert, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    argparse.Namespace,
]
"""The classes that a pickle may create, beside those that torch permits, each with the name in the pickle."""


def load(path: Path) -> Any:
    """The content of a file of `torch.save`. Its tensors are mapped: their values are read when they are used.

    Raises UsageError for a file that is damaged, or that only its own code can read.
    """
    try:
        with torch.serialization.safe_globals(KNOWN):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"'{path.parent}' lacks '{path.name}'; copy the checkpoint again") from None
    except OSError as error:
        raise RunError(f"cannot read '{path}': {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        if unsafe := _unsafe(path):
            raise UsageError(
                f"'{path}' contains objects of {', '.join(unsafe[:3])}, and reading them would run code, so mplug "
                f"does not read it; save the checkpoint again without them (client_state of save_checkpoint)"
            ) from None
        raise damaged(path, error) from None
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception | str) -> UsageError:
    """The error about a file without the content that DeepSpeed writes."""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return UsageError(f"cannot read '{path}': {reason}; copy the checkpoint again")


def _unsafe(path: Path) -> list[str]:
    """The names of the classes and functions that a pickle needs and that it may not have. Runs none of them."""
    try:
        with torch.serialization.safe_globals(KNOWN):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a damaged file can raise anything: then it is reported as damaged
        return []
