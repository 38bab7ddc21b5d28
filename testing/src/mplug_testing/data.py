"""The suite for data plugins.

    from mplug_testing import DataSuite

    class TestJotter(DataSuite):
        plugin = "jotter"
        settings = {"data.path": str(Path(__file__).with_name("notes.jsonl"))}

Its tests build the loaders of every rank in one process, as `build_loader` would on each rank, and compare samples.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.errors import UsageError, counted
from mplug.registry.hooks import implemented
from mplug.run.prepare import check_data, prepare
from mplug_faults import out_of_range
from mplug_testing.fingerprints import FingerprintChecks
from mplug_testing.harness import installed_plugins, tiny_config
from mplug_testing.leftovers import nothing_left
from mplug_testing.missing_data import PATH, accepted_missing_data
from mplug_testing.samples import (
    difference,
    first_samples,
    image,
    kept,
    leaked,
    malformed,
    merged_state,
    mislabelled,
    other_random_numbers,
    read,
    refuse,
    repeated,
    size_of,
    taken,
    unfair,
    unpacked,
)
from mplug_testing.stream_samples import watched
from mplug_testing.suite import Fault, naming_failures, require, smoke

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.contracts.loader import Loader
    from mplug.run.run import Run

LOOK = 64
"""Number of samples that a test reads if it needs no whole epoch."""
PORTIONS = (8, 16, 5, 8)
"""Numbers of samples of successive calls of `take`: three that 2 and 4 divide, and one that they do not."""
LONGEST_EPOCH = 2000
"""Maximum number of samples of an epoch that a test reads whole."""
LARGEST_STATE = 1 << 20
"""Maximum bytes of a loader's state: it is part of the checkpoint's one JSON file, which every rank reads."""
TEXTS = ("", "plain text: 1 + 2 = 3\n\tdone.", "Grüße, 世界 🌍", "".join(map(chr, range(32, 127))))


class DataSuite(FingerprintChecks):
    """The requirements for a data plugin: one global order of samples under any layout, and exact resume.

    Give data in `settings` with short epochs (some hundred samples of `trainer.seq_length` tokens) and without repeated
    text. Then the tests also cover the boundaries of epochs, and can tell the splits apart.
    """

    kind = "data"
    splits_are_disjoint: ClassVar[bool] = True
    """The training split contains no text of the validation split."""
    next_tokens: ClassVar[bool] = True
    """Labels are next tokens. False for labels of another kind, such as classes."""
    shuffles: ClassVar[bool] = True
    """The training order depends on `trainer.seed`, and differs from epoch to epoch."""

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """`data.name`."""
        return {"data.name": cls.plugin}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """`data`."""
        return ("data",)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Both splits, and several numbers of data-parallel ranks."""
        for name, values in {
            "split": ("train", "validation"),
            "world_size": (2, 4),
            "sizes": ((1, 1), (1, 4), (4, 2)),
        }.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    # Loaders for the tests.

    @classmethod
    def layout(cls, world_size: int, **changes: Any) -> "RunConfig":
        """The config of the plugin's tiny run on `world_size` data-parallel ranks."""
        if world_size > 1:
            changes["parallel__layout"] = f"{cls.config().parallel.data}{world_size}"
        with naming_failures("its config"):
            return cls.config(**changes)

    @classmethod
    def ranks(cls, config: "RunConfig") -> "list[Run]":
        """The prepared runs of all ranks of a config, without starting a process."""
        from mplug.model.build import choose_device

        with naming_failures("preparing a run"):
            runs = [prepare(config)]
            runs += [prepare(config) for _ in range(1, runs[0].mesh.world_size)]
        for rank, run in enumerate(runs):
            run.rank, run.device = rank, choose_device(config)
        return runs

    @classmethod
    def loader(cls, run: "Run", split: str = "train") -> "Loader":
        """The loader of a split on a rank."""
        from mplug.training.assembly import build_loader

        with naming_failures(f"build_loader of the {split} split"):
            return watched(run, build_loader(run, split))

    @classmethod
    def loaders(cls, config: "RunConfig", split: str = "train") -> "list[Loader]":
        """New loaders of all ranks of a config."""
        return [cls.loader(run, split) for run in cls.ranks(config)]

    @classmethod
    def alone(cls, split: str = "train", **changes: Any) -> "Loader":
        """A new loader of a run with one rank, which reads the whole global order."""
        (loader,) = cls.loaders(cls.layout(1, **changes), split)
        return loader

    @classmethod
    def values_for(cls, field: str) -> Sequence[Any] | None:
        """A path that does not exist, for the field `path`: the plugin refuses it."""
        return super().values_for(field) or ([PATH] if field == "path" else None)

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The samples of both splits, what the loader states about itself, and the tokens of the plugin's tokenizer."""
        from mplug.model.build import choose_device
        from mplug_testing.fields import digest

        run = prepare(tiny_config(settings))
        check_data(run)
        run.device = choose_device(run.config)
        for split in ("train", "validation"):
            loader = cls.loader(run, split)
            epoch = loader.samples_per_epoch
            yield f"sizes of the {split} split", (loader.vocab_size, epoch)
            yield f"{split} samples", digest([dict(sample.rows) for sample in read(loader, LOOK)])
        tokenizer = run.hooks.call.build_tokenizer(run=run)
        yield "tokens", [list(tokenizer.encode(text)) for text in TEXTS] if tokenizer is not None else []

    def _epoch(self, loader: "Loader") -> int | None:
        """The number of samples of an epoch; None if the loader does not state it or it is too large to read."""
        stated = loader.samples_per_epoch
        require(stated is None or stated > 0, f"samples_per_epoch is {stated}; it must be positive, or None")
        return stated if stated is not None and stated <= LONGEST_EPOCH else None

    @smoke
    def test_missing_data_is_refused_before_a_run_is_announced(self) -> None:
        """If its Config has a field `path`: by `check_data` or `configure`, with the path in the sentence."""
        if "path" in self.fields():
            refuse(accepted_missing_data(self.config))

    @smoke
    def test_it_builds_loaders(self) -> None:
        """`build_loader` is the one hook that a run requires of a data plugin."""
        hooks = implemented(installed_plugins().load(self.entry()))
        require("build_loader" in hooks, f"'{self.plugin}' does not implement the hook 'build_loader'")

    # Micro batches.

    def test_a_micro_batch_is_what_the_contract_says(self, split: str) -> None:
        """Entries, shapes, dtypes, device, and `trainer.micro_batch_size` samples."""
        (run,) = self.ranks(self.layout(1))
        loader, size = self.loader(run, split), run.micro_batch_size
        batches = taken(loader, 4 * size + 1)
        for batch in batches:
            refuse(malformed(batch, run.config.trainer.seq_length))
        sizes = [len(batch["sample_ids"]) for batch in batches]
        expected = [size] * 4 + [1]
        require(sizes == expected, f"{4 * size + 1} samples come in micro batches of {sizes}, not of {expected}")
        for batch in taken(loader, LOOK):
            refuse(out_of_range(batch, loader.vocab_size))

    def test_a_run_finds_no_fault_in_its_micro_batches(self, world_size: int, split: str) -> None:
        """A run checks every micro batch and counts the samples of every rank. A fault ends the run."""
        from mplug.training.source import Source
        from mplug_faults import Supervised

        for run in self.ranks(self.layout(world_size)):
            supervised = Supervised(self.loader(run, split), Source.of(run, split))
            for portion in PORTIONS:
                with naming_failures(f"take({portion}) on rank {run.rank} of {world_size}"):
                    list(supervised.take(portion))

    def test_labels_are_the_next_tokens(self, split: str) -> None:
        """Each label is the next token, or ignored."""
        if not self.next_tokens:
            raise SkipTest("the suite sets next_tokens = False")
        refuse(mislabelled(read(self.alone(split), LOOK)))

    def test_a_micro_batch_stays_as_it_is_when_the_next_ones_are_read(self) -> None:
        """The host holds several micro batches at a time, so the loader must not reuse their memory."""
        expected = read(self.alone(), LOOK)
        held = [sample for batch in taken(self.alone(), LOOK) for sample in unpacked(batch)]
        refuse(difference(held, expected), "after later micro batches are read; do not reuse a micro batch's memory")

    # One order.

    def test_samples_have_one_order_whatever_the_portions_and_micro_batches(self, split: str) -> None:
        """`sample_ids` number the samples of the global order."""
        expected = read(self.alone(split), sum(PORTIONS))
        numbers = [sample.number for sample in expected]
        consecutive = numbers == list(range(len(numbers)))
        require(consecutive, f"sample_ids are {numbers[:9]}...; they must number the global order: 0, 1, 2 ...")
        for size in (1, self.config().trainer.global_batch_size):
            found = read(self.alone(split, trainer__micro_batch_size=size), sum(PORTIONS))
            refuse(difference(found, expected), f"if micro batches have {counted(size, 'sample')}")
        loader = self.alone(split)
        portions = [sample for portion in PORTIONS for sample in read(loader, portion)]
        refuse(difference(portions, expected), f"if samples are taken in portions {PORTIONS}")

    def test_a_run_of_another_length_has_the_same_order_or_is_refused_the_state(self, split: str) -> None:
        """A resumed run may be longer. The order must then stay the same, or the loader must refuse the state."""
        loader, steps = self.alone(split), self.config().trainer.steps
        expected = read(loader, LOOK)
        for other_steps in (1, 5 * steps):
            other = self.alone(split, trainer__steps=other_steps)
            fault = difference(read(other, LOOK), expected)
            if fault:
                try:
                    other.load_state_dict(copy.deepcopy(loader.state_dict()))
                except UsageError:
                    continue
                raise Fault(
                    f"{fault} if trainer.steps is {other_steps} instead of {steps}; make the order independent of the "
                    f"number of steps, or refuse the state of a run with another number by a UsageError"
                )

    def test_a_seed_gives_one_order_in_every_process(self) -> None:
        """Ranks are processes: the order must not depend on a process's own random numbers or hashes."""
        from mplug_testing.workers import run_workers

        expected = read(self.alone(), LOOK)
        with other_random_numbers():
            again = read(self.alone(), LOOK)
        refuse(difference(again, expected), "if global random numbers have another state")
        (elsewhere,) = run_workers(1, first_samples, self.tiny(), LOOK)
        refuse(difference(elsewhere, expected), "in another process with the same seed")
        if self.shuffles:
            other = read(self.alone(trainer__seed=self.config().trainer.seed + 1), LOOK)
            changed = difference(other, expected)
            require(changed, f"another trainer.seed gives the same order of {LOOK} samples; shuffle by trainer.seed")

    # Over ranks.

    def test_its_fingerprint_is_one_text_on_every_rank(self) -> None:
        """It depends only on the data. Another seed gives the same fingerprint, so that data may move."""
        seed = self.config().trainer.seed + 1
        loaders = [self.alone(), self.alone(trainer__seed=seed), *self.loaders(self.layout(2))]
        found = [loader.fingerprint for loader in loaders]
        require(
            found == [None] * len(found) or (isinstance(found[0], str) and len(set(found)) == 1),
            f"loaders of the same data have the fingerprints {found}; a fingerprint must be one text that depends only "
            f"on the data",
        )

    def test_ranks_together_read_what_one_rank_reads(self, world_size: int, split: str) -> None:
        """Without overlap or gap, and with the same contents."""
        alone, loaders = self.alone(split), self.loaders(self.layout(world_size), split)
        for portion in PORTIONS:
            expected = read(alone, portion)
            refuse(unfair([read(loader, portion) for loader in loaders], expected), f"(over {world_size} ranks)")

    def test_ranks_that_split_the_model_read_the_same_samples(self) -> None:
        """`run.mesh.batch_shard(run.rank)` gives a rank's part of the batch; the rank's number does not."""
        from mplug.layout.mesh import Axis, Mesh

        config, parts = self.layout(2), []
        for rank in range(4):
            run, _ = self.ranks(config)
            run.mesh, run.rank = Mesh.of([*run.mesh.axes.values(), Axis("twin", 2, distance=-1)], 4), rank
            parts.append(read(self.loader(run), 8))
        remedy = "use run.mesh.batch_shard(run.rank) for a rank's part of the batch"
        for first, second in ((0, 1), (2, 3)):
            fault = difference(parts[second], parts[first])
            refuse(fault, f"on rank {second}, which splits the model with rank {first}, and not the batch; {remedy}")
        refuse(unfair([parts[0], parts[2]], read(self.alone(), 8)), f"(of two ranks that split the batch); {remedy}")

    # Resuming.

    def test_it_resumes_exactly(self, sizes: tuple[int, int], split: str) -> None:
        """On the same and on another number of ranks, within epochs and at their boundary, and twice in a row."""
        (before, after), alone = (self.ranks(self.layout(size)) for size in sizes), self.alone(split)
        epoch = self._epoch(alone)
        places = (1, 21, *((epoch - 3, epoch, epoch + 5) if epoch and epoch > 3 else ()))
        expected = read(alone, max(places) + 16)
        for place in places:
            loaders = [self.loader(run, split) for run in before]
            for loader in loaders:
                read(loader, place)
            for start in (place, place + 8):
                state = kept(merged_state(loaders))
                loaders = [self.loader(run, split) for run in after]
                for loader in loaders:
                    with naming_failures("load_state_dict"):
                        loader.load_state_dict(copy.deepcopy(state))
                fault = unfair([read(loader, 8) for loader in loaders], expected[start : start + 8])
                refuse(fault, f"after a resume on {counted(sizes[1], 'rank')} from {start} samples on {sizes[0]}")

    def test_its_state_is_small_plain_data(self) -> None:
        """Plain data as checkpoints hold it, of a size that does not grow with the steps."""
        loader = self.alone()
        bytes_after = []
        for _ in range(3):
            read(loader, LOOK)
            bytes_after.append(size_of(loader.state_dict()))
        largest = max(bytes_after)
        require(largest <= LARGEST_STATE, f"its state has {largest:,} bytes; it must hold a position, not data")
        growth = min(after - before for before, after in pairwise(bytes_after))
        require(growth < LOOK, f"its state grows with the samples: {bytes_after} bytes, one size per {LOOK} samples")

    def test_its_state_is_a_snapshot(self) -> None:
        """The state does not change when the loader that returned it, or a loader that loaded it, reads on."""
        giver, receiver = self.alone(), self.alone()
        read(giver, 8)
        state = giver.state_dict()
        before = image(state)
        require(image(giver.state_dict()) == before, "state_dict changes the state; it must only read it")
        read(giver, LOOK)
        giver.state_dict()
        require(image(state) == before, "the state changes while the loader that returned it reads on; return a copy")
        receiver.load_state_dict(state)
        read(receiver, LOOK)
        require(image(state) == before, "the state changes while the loader that loaded it reads on; store a copy")

    def test_evaluating_leaves_training_alone(self) -> None:
        """An evaluation reads validation samples and then restores the state. It reads the same samples each time."""
        expected = read(self.alone(), 24)
        (run,) = self.ranks(self.layout(1))
        training, validation = self.loader(run, "train"), self.loader(run, "validation")
        found, evaluated = read(training, 8), []
        for _ in range(2):
            beginning = validation.state_dict()
            evaluated.append(read(validation, 8))
            validation.load_state_dict(beginning)
            found += read(training, 8)
        refuse(difference(found, expected), "if the run evaluates in between")
        refuse(difference(evaluated[1], evaluated[0]), "in the run's second evaluation")

    # Epochs and splits.

    def test_every_sample_comes_once_an_epoch(self, split: str) -> None:
        """If the loader states `samples_per_epoch`."""
        loader = self.alone(split)
        epoch = self._epoch(loader)
        if epoch is None:
            raise SkipTest(f"the loader states no samples_per_epoch of at most {LONGEST_EPOCH}")
        first, second = read(loader, epoch), read(loader, epoch)
        for name, samples in (("first", first), ("second", second)):
            found = len(samples)
            require(found == epoch, f"the {name} epoch has {found} samples, and samples_per_epoch is {epoch}")
            refuse(repeated(samples), f"in the {name} epoch, which must have each of its {epoch} samples once")
        if self.shuffles and split == "train":
            same = [sample.tokens for sample in first] == [sample.tokens for sample in second]
            require(not same, "the second epoch has the order of the first; shuffle every epoch")

    def test_the_splits_share_no_text(self) -> None:
        """If the author states `splits_are_disjoint`: the training text contains no validation sample."""
        if not self.splits_are_disjoint:
            raise SkipTest("the suite sets splits_are_disjoint = False")
        loader, other = self.alone("train"), self.alone("validation")
        training = read(loader, self._epoch(loader) or LOOK)
        found = leaked(training, read(other, min(self._epoch(other) or LOOK, LOOK)))
        if found is not None:
            raise Fault(f"validation sample {found.number} is in the training text: tokens {list(found.tokens)}")

    def test_text_survives_the_tokenizer(self) -> None:
        """If the plugin builds a tokenizer."""
        (run,) = self.ranks(self.layout(1))
        with naming_failures("build_tokenizer"):
            tokenizer = run.hooks.call.build_tokenizer(run=run)
        if tokenizer is None:
            raise SkipTest("the plugin builds no tokenizer")
        vocab_size = self.loader(run).vocab_size
        for text in TEXTS:
            with naming_failures(f"encoding {text!r}"):
                tokens = list(tokenizer.encode(text))
            outside = [token for token in tokens if not 0 <= token < vocab_size]
            require(not outside, f"encoding {text!r} gives token {outside and outside[0]}; vocab_size is {vocab_size}")
            with naming_failures(f"decoding {text!r}"):
                again = tokenizer.decode(tokens)
            require(again == text, f"decoding the tokens of {text!r} gives {again!r}")

    def test_a_loader_leaves_nothing_running(self) -> None:
        """No thread, process or open file outlives a loader, even if it is dropped in the middle of a batch."""
        nothing_left("a loader that is no longer used", self._use_and_drop)

    def _use_and_drop(self) -> None:
        (run,) = self.ranks(self.layout(1))
        for split in ("train", "validation"):
            loader = self.loader(run, split)
            read(loader, 8)
            next(iter(loader.take(8)))

    def test_a_run_trains_on_it_and_resumes(self) -> None:
        """A real run of a few steps, and a second run of its second half, from the checkpoint in the middle."""
        from mplug_testing.runs import trained

        config = self.config(trainer__steps=4, checkpoint__every=2, checkpoint__keep=9)
        with TemporaryDirectory(prefix="mplug-run-") as folder:
            with naming_failures("a run of 4 steps"):
                whole = trained(config, Path(folder) / "whole")
            with naming_failures("a resumed run"):
                resumed = trained(config, Path(folder) / "resumed", resume_from=whole.saved[0])
        expected = {step: figures for step, figures in whole.figures.items() if step > 2}
        same = resumed.figures == expected
        require(same, f"a resumed run has the losses {resumed.losses}, and an uninterrupted run {whole.losses}")
