"""The suite for data plugins.

    from mplug_testing import DataSuite

    class TestJotter(DataSuite):
        plugin = "jotter"
        settings = {"data.path": str(Path(__file__).with_name("notes.jsonl"))}

Its tests build the loaders of every rank in one process, as `build_loader` would on each rank, and compare samples.
"""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar
from unittest import SkipTest

from mplug.registry.hooks import implemented
from mplug_faults import out_of_range
from mplug_testing.harness import installed_plugins
from mplug_testing.leftovers import nothing_left
from mplug_testing.loaders import LOOK, TEXTS
from mplug_testing.missing_data import accepted_missing_data
from mplug_testing.sample_orders import PORTIONS, OrderChecks
from mplug_testing.samples import (
    difference,
    image,
    leaked,
    malformed,
    mislabelled,
    read,
    refuse,
    size_of,
    taken,
    unpacked,
)
from mplug_testing.suite import Fault, naming_failures, require, smoke

LARGEST_STATE = 1 << 20
"""Maximum bytes of a loader's state: it is part of the checkpoint's one JSON file, which every rank reads."""


class DataSuite(OrderChecks):
    """The requirements for a data plugin: one global order of samples under any layout, and exact resume.

    Give data in `settings` with short epochs (some hundred samples of `trainer.seq_length` tokens) and without repeated
    text. Then the tests also cover the boundaries of epochs, and can tell the splits apart.
    """

    splits_are_disjoint: ClassVar[bool] = True
    """The training split contains no text of the validation split."""
    next_tokens: ClassVar[bool] = True
    """Labels are next tokens. False for labels of another kind, such as classes."""

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
