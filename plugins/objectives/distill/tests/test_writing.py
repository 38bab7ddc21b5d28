"""`mplug teach` in several processes, and after an interruption: the file is that of one process, bit for bit."""

import fcntl
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn_weights import DrawnWeights
from mplug_distill import top_writer
from mplug_distill.top_file import TopFile
from mplug_distill.top_writer import folder_of, is_left
from mplug_distill.writing import Job, Rounds, prepared, taught
from torch import Tensor

from mplug import UsageError
from mplug_nn.top_probabilities import Parts, token_top_probabilities
from mplug_testing.harness import as_rank, overrides_of, tiny_settings
from mplug_testing.workers import run_workers

V, LENGTH, SAMPLES, K = 67, 12, 11, 5
SETTINGS: dict[str, Any] = {
    "model.vocab_size": V,
    "data.name": "mock",
    "data.documents": 3,
    "kernels.default": None,
    "trainer.seq_length": LENGTH,
    "trainer.precision": "fp64",
}


def job_of(output: Path, layout: str = "", samples: int = SAMPLES, **changes: Any) -> Job:
    weights: Any = DrawnWeights(output.parent / "weights")
    own = {**SETTINGS, "trainer.micro_batch_size": 2, "trainer.global_batch_size": 8, "parallel.layout": layout}
    return Job(tiny_settings(), overrides_of({**own, **changes}), weights, "train", samples, K, "float64", output)


def write(jobs: list[Job]) -> None:
    for job in jobs:
        taught(as_rank(prepared(job)), job)


LAYOUTS = {"dp2": True, "tp2": False, "fsdp2": True, "pp2": True, "zero2": True}
"""Whether the file has the bits of that of one process: tensor parallelism adds in another order."""
LARGER = {"tp2pp2": False, "pp2dp2": True, "tp2dp2 parallel.tp.sequence_parallel=false": False, "dp4": True}


def require_same(one: Path, other: Path, *, bits: bool) -> None:
    if bits:
        assert one.read_bytes() == other.read_bytes(), other.name
    files = [TopFile(path, "data.file") for path in (one, other)]
    for name in ("offsets", "digests", "tokens"):
        assert np.array_equal(*(getattr(file, name) for file in files)), (name, other.name)
    assert np.allclose(*(file.log_probabilities for file in files), rtol=1e-10, atol=1e-12), other.name


@pytest.mark.wide("layouts", quick=["2-layouts0"])
@pytest.mark.parametrize(
    ("world", "layouts"), [(2, ("dp2", "tp2")), (2, ("fsdp2", "pp2", "zero2")), (4, tuple(LARGER))]
)
def test_the_file_does_not_depend_on_the_layout(
    world: int, layouts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 samples are no multiple of the samples of two ranks, and 67 tokens an odd number to divide.

    The first file continues what one process has left: one micro batch, half of a round of two ranks.
    """
    one = tmp_path / "one"
    write([job_of(one)])
    jobs = []
    for number, layout in enumerate(layouts):
        word, *settings = layout.split()
        changes = dict(setting.split("=") for setting in settings)
        jobs.append(job_of(tmp_path / f"file{number}", word, **changes))
    interrupt(job_of(jobs[0].output), monkeypatch)
    run_workers(world, write, jobs)
    for layout, job in zip(layouts, jobs, strict=True):
        require_same(one, job.output, bits=(LAYOUTS | LARGER)[layout])


class Ranks:
    """Threads in the place of ranks that divide a vocabulary of `size` tokens; the last ones may have padding alone."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.each, self.values = number, -(-size // number), [torch.empty(0)] * number
        self.barrier = Barrier(number, timeout=20)

    def all_of(self, rank: int, values: Tensor) -> list[Tensor]:
        self.values[rank] = values
        self.barrier.wait()
        found = [*self.values]
        self.barrier.wait()
        return found

    def find(self, rank: int, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        padded = F.pad(logits, (0, self.number * self.each - logits.shape[1]), value=float("-inf"))

        def merge(values: Tensor, op: str) -> Tensor:
            found = torch.stack(self.all_of(rank, values))
            return found.sum(dim=0) if op == "SUM" else found.amax(dim=0)

        parts = Parts(lambda values: torch.cat(self.all_of(rank, values), dim=1), merge, rank * self.each)
        return token_top_probabilities(padded.split(self.each, dim=1)[rank], k, parts)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("size", [11, 5])
def test_a_vocabulary_in_parts_has_the_largest_probabilities_of_the_whole(size: int, ranks: int) -> None:
    """Plain torch is the reference. k exceeds the tokens of a part; the last of four parts of 5 has padding alone."""
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logs = logits.log_softmax(dim=-1)
    for k in (1, 4, size):
        together = Ranks(ranks, size)
        with ThreadPoolExecutor(ranks) as threads:
            results = [*threads.map(partial(together.find, logits=logits, k=k), range(ranks))]
        expected, order = logs.topk(k, dim=-1)
        for tokens, found in results:
            assert torch.equal(tokens, order)
            torch.testing.assert_close(found[:, :k], expected, rtol=1e-12, atol=1e-12)
            rest = 1 - expected.exp().sum(dim=-1)
            torch.testing.assert_close(found[:, k].exp(), rest.clamp(min=0), rtol=1e-9, atol=1e-12)


class Killed(BaseException):
    """In the place of SIGKILL: nothing of the process runs afterwards."""


@pytest.mark.parametrize("saved", [0, 3, 4])
def test_an_interrupted_command_continues_to_the_same_bits(
    saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill, with arrays beyond the samples that are saved."""
    write([job_of(tmp_path / "whole")])
    job, left = job_of(tmp_path / "file"), tmp_path / "left"
    passes = Rounds._own
    add = top_writer.TopWriter.add

    def add_some(self: Any, *sample: Any) -> None:
        add(self, *sample)
        if self.num_samples == saved:
            self.save()
        if self.num_samples == 6:
            for file in self.files.values():
                file.flush()
            shutil.copytree(self.folder, left)
            raise Killed

    monkeypatch.setattr(top_writer.TopWriter, "add", add_some)
    with pytest.raises(Killed):
        write([job])
    monkeypatch.setattr(top_writer.TopWriter, "add", add)
    assert not job.output.exists()
    shutil.rmtree(folder_of(job.output))
    left.rename(folder_of(job.output))
    computed = list[int]()
    monkeypatch.setattr(Rounds, "_own", lambda self, number: computed.append(number) or passes(self, number))
    write([job])
    require_same(tmp_path / "whole", job.output, bits=True)
    assert sum(computed) == 12 - saved // 2 * 2, "the samples of whole micro batches are not computed again"
    assert not is_left(job.output)


def interrupt(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second round."""
    passes = Rounds._own

    def ends(self: Rounds, number: int) -> Any:
        if (folder_of(job.output) / "tokens").stat().st_size:
            raise KeyboardInterrupt
        return passes(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "_own", ends)
        patch.setattr(top_writer, "SAVE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            write([job])
    assert is_left(job.output)


def test_what_was_made_from_something_else_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path / "file")
    interrupt(job, monkeypatch)
    samples = folder_of(job.output) / "samples"
    assert samples.stat().st_size == 2 * 16
    with (folder_of(job.output) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is writing"):
            write([job])
    for other, sentence in (
        (replace(job, k=K + 1), "was made with other k; use the same options to continue it, --restart to begin anew"),
        (job_of(job.output, **{"trainer.seed": 3}), "seed and settings; use"),
    ):
        with pytest.raises(UsageError, match=sentence):
            write([other])
    content = samples.read_bytes()
    samples.write_bytes(content[:16] + bytes([content[16] ^ 1]) + content[17:])
    with pytest.raises(UsageError, match=r"sample 2 of the data has changed since .* use --restart"):
        write([job])
    write([replace(job, k=K + 1, restart=True)])
    assert TopFile(job.output, "data.file").origin.k == K + 1


def test_layouts_that_divide_positions_are_refused_before_launch(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cp=2 divides the positions of a sample, and 'mplug teach' writes whole"):
        prepared(job_of(tmp_path / "file", "cp2"))
