"""A sample of Energon that cannot be used: the error names its tar and its file, with worker processes too."""

import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mplug import RunError, UsageError
from mplug.training.assembly import build_loader
from mplug.training.feed import Feed
from mplug.training.supervised_loader import Source
from mplug_testing.harness import tiny_run

TINY: dict[str, Any] = {"data.name": "energon", "data.streams": 1, "trainer.seq_length": 32}
IMAGES = {"data.task_encoder": "mplug_energon.encoders:ImageText"}


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_for_a_bad_sample_names_its_tar_and_its_file(
    text_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A worker process's traceback stays out of the sentence, and in the log."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for path in shutil.copytree(text_set, tmp_path / "set").glob("train-*.tar"):
        content = bytearray(path.read_bytes())
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                content[member.offset + 148 : member.offset + 156] = b"\xff" * 8  # its checksum
        path.write_bytes(content)
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "a damaged tar": ({"data.path": str(tmp_path / "set")}, r"^data.path .*: tar '.*/train-\d.tar' at byte \d+: "),
        "an encoder": (
            {"data.task_encoder": "own_encoders:Broken"},
            r"^a sample .* \('.*/train-\d\.tar', '(alpha|beta)\d+\.txt'\): ZeroDivisionError: [^\n]*on_error=skip$",
        ),
        "a refusal": (
            IMAGES,
            r"^'.*/train-\d\.tar', '(alpha|beta)\d+\.txt': .*has no image; set data\.task_encoder to an encoder",
        ),
    }
    for what, (changed, sentence) in changes.items():
        run = tiny_run({**TINY, "data.path": str(text_set), "data.num_workers": workers, **changed})
        run.device = "cpu"
        feed = Feed(build_loader(run, "train"), "cpu", Source.of(run, "train"))
        with pytest.raises((UsageError, RunError)) as caught:
            list(feed.take(2))
        assert re.search(sentence, str(caught.value)), (what, str(caught.value))
