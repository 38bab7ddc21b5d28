"""What the suite for data plugins requires of the order of samples: one under any layout, and after a resume."""

import copy
from typing import ClassVar
from unittest import SkipTest

from mplug.errors import UsageError, counted
from mplug_testing.loaders import LONGEST_EPOCH, LOOK, LoaderChecks
from mplug_testing.samples import (
    difference,
    first_samples,
    kept,
    merged_state,
    other_random_numbers,
    read,
    refuse,
    repeated,
    unfair,
)
from mplug_testing.suite import Fault, naming_failures, require

PORTIONS = (8, 16, 5, 8)
"""Numbers of samples of successive calls of `take`: three that 2 and 4 divide, and one that they do not."""


class OrderChecks(LoaderChecks):
    """The part of `DataSuite` about the global order."""

    shuffles: ClassVar[bool] = True
    """The training order depends on `trainer.seed`, and differs from epoch to epoch."""

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
