"""The file of a teacher's largest probabilities: written once, then read by sample. Imports no torch.

It has the form of safetensors. Of N samples with T targets in all, and k tokens of a target:

- `offsets` [N + 1], int64: the targets of sample n are those from offsets[n] to offsets[n + 1], in their order.
- `digests` [N], int64: of the sample's tokens and labels.
- `tokens` [T, k], int32: the most probable tokens.
- `log_probabilities` [T, k + 1]: the teacher's log-probabilities of these, and of all other tokens together.

Its metadata have what the samples were made from, as JSON.
"""

import json
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mplug import UsageError

FORM, TEMPERATURE = "mplug top log-probabilities 1", 1
DTYPES = {"float16": "F16", "float32": "F32", "float64": "F64"}
NUMPY = {"I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"}


@dataclass(frozen=True)
class Origin:
    """What a file was made from. `tokenizer` and `data` are fingerprints, or None if there is none."""

    k: int
    vocab_size: int
    tokenizer: str | None
    data: str | None
    split: str
    seed: int
    seq_length: int


def digest(tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> int:
    """A digest of a sample's tokens and labels [S]."""
    found = blake2b(np.ascontiguousarray(tokens, "<i8").data, digest_size=8)
    found.update(np.ascontiguousarray(labels, "<i8").data)
    return int.from_bytes(found.digest(), "little", signed=True)


class TopFile:
    """An open file. UsageError, with `field`, if it is missing, of another form, or incomplete."""

    def __init__(self, path: Path, field: str) -> None:
        self.path, self.where = path, f"{field} '{path}'"
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, 1 << 20)))
            metadata = header.pop("__metadata__")
            self.origin, self.contents, arrays = self._origin(metadata), metadata["contents"], header
            end = 8 + length + max(one["data_offsets"][1] for one in arrays.values())
        except OSError as error:
            raise UsageError(f"{self.where} cannot be read: {error.strerror}; {REMEDY}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{self.where} is no file of a teacher's log-probabilities; {REMEDY}") from None
        if path.stat().st_size != end:
            raise UsageError(
                f"{self.where} has {path.stat().st_size} bytes instead of {end}, so it is not whole; {REMEDY}"
            )
        for name in ("offsets", "digests", "tokens", "log_probabilities"):
            one = arrays[name]
            begin = 8 + length + one["data_offsets"][0]
            shape = tuple(one["shape"])
            kind = np.dtype(NUMPY[one["dtype"]])
            array = np.memmap(path, kind, "r", begin, shape) if 0 not in shape else np.empty(shape, kind)
            setattr(self, name, array)

    offsets: NDArray[np.int64]
    digests: NDArray[np.int64]
    tokens: NDArray[np.int32]
    log_probabilities: NDArray[Any]

    @staticmethod
    def _origin(metadata: dict[str, str]) -> Origin:
        if metadata["form"] != FORM or json.loads(metadata["temperature"]) != TEMPERATURE:
            raise ValueError(metadata)
        return Origin(**{one.name: json.loads(metadata[one.name]) for one in fields(Origin)})

    @property
    def num_samples(self) -> int:
        """The number of samples, the first ones of the global order."""
        return len(self.digests)

    def read(
        self, number: int, tokens: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[Any]]:
        """(tokens [t, k], log-probabilities [t, k + 1]) of the t targets of a sample, which is compared [S]."""
        if number >= self.num_samples:
            raise UsageError(
                f"{self.where} is too short: it has {self.num_samples} samples, and the run takes sample {number + 1}; "
                f"write more of them (mplug teach --samples)"
            )
        if digest(tokens, labels) != self.digests[number]:
            raise UsageError(
                f"{self.where}: sample {number + 1} of the run is another one than that of the file, which has samples "
                f"of the split {self.origin.split} with trainer.seed={self.origin.seed} and trainer.seq_length="
                f"{self.origin.seq_length}; train on the same data in the same order, or write the file again"
            )
        own = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return self.tokens[own], self.log_probabilities[own]


REMEDY = "write one with 'mplug teach'"
