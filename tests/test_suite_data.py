"""The data suite: a sound third-party loader passes it, and it catches what authors of loaders get wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mplug_testing import DataSuite, Fault

JOTTER, TABLE = (Path(__file__).parent / "third_party" / name for name in ("nova-jotter", "nova-table"))


class Jotter(DataSuite):
    plugin = "jotter"
    settings = {"data.path": str(JOTTER / "tests" / "notes.jsonl")}


class Buffered(Jotter):
    settings = {**Jotter.settings, "data.shuffle_buffer": 30}


class Table(DataSuite):
    plugin = "table"
    settings = {"data.path": str(TABLE / "tests" / "notes.csv")}
    examples = {"column": ["title"], "delimiter": [";"]}


class WithoutExamples(Table):
    """Of an author who says nothing about the fields."""

    examples = {}


@pytest.mark.wide("suites")
@pytest.mark.parametrize("package", ["nova-jotter", "nova-table"])
def test_a_sound_loader_passes(own_tests: Callable[..., str], package: str) -> None:
    assert "failed" not in own_tests(package)


LABELS = '"labels": tokens[:, 1:].contiguous()'
SHARD = "shard, size = run.mesh.batch_shard(run.rank), run.micro_batch_size"
PARTS = "start, stop = (num_samples * part // count for part in (index, index + 1))"
BEGINS = "begins = range(start, stop, self.micro_batch_size)"
ORDER = "np.random.default_rng([self.seed, epoch]).permutation(self.count)"
STATE = 'return {"samples": self.samples, "next": self.next, "buffer": torch.tensor(self.buffer, dtype=torch.int64)}'
LOADED = 'self.samples, self.next, self.buffer = state["samples"], state["next"], state["buffer"].tolist()'
START = "self.samples = self.next = 0"
THREAD = "import threading as t; t.Thread(target=t.Event().wait, name='read-ahead', daemon=True).start()"

FAULTS = {
    "missing data is found in the loader only": (
        "if not Path(self.config.path).is_file():",
        "if False:",
        lambda: Jotter().test_missing_data_is_refused_before_a_run_is_announced(),
        "does not exist, and neither 'check_data' nor 'configure' refuses it",
    ),
    "the order depends on the length of the run": (
        "Permutations(windows.count, trainer.seed)",
        "Permutations(windows.count, trainer.seed + trainer.steps)",
        lambda: Jotter().test_a_run_of_another_length_has_the_same_order_or_is_refused_the_state("train"),
        "if trainer.steps is 1 instead of 100; make the order independent of the number of steps",
    ),
    "an entry is missing": (
        '"positions": torch.arange(self.seq_length)[None],',
        "",
        lambda: Jotter().test_a_micro_batch_is_what_the_contract_says("train"),
        "the micro batch has no entry 'positions' [1 or B, S]",
    ),
    "positions lack their first dimension": (
        "torch.arange(self.seq_length)[None]",
        "torch.arange(self.seq_length)",
        lambda: Jotter().test_a_micro_batch_is_what_the_contract_says("train"),
        "'positions' has shape (16,); it must be [1 or B, S], here with B=2 and S=16",
    ),
    "positions count from one": (
        "torch.arange(self.seq_length)[None]",
        "torch.arange(1, self.seq_length + 1)[None]",
        lambda: Jotter().test_a_micro_batch_is_what_the_contract_says("train"),
        "'positions' holds 16; values must be 0 to 15, because the sequence length is 16",
    ),
    "labels are too narrow": (
        ".astype(np.int64)",
        ".astype(np.int32)",
        lambda: Jotter().test_a_micro_batch_is_what_the_contract_says("train"),
        "'labels' has dtype torch.int32; a loss takes int64",
    ),
    "tokens are no integers": (
        ".astype(np.int64)",
        ".astype(np.float32)",
        lambda: Jotter().test_a_micro_batch_is_what_the_contract_says("train"),
        "'tokens' has dtype torch.float32; it must hold signed integers",
    ),
    # A machine without a GPU has one other device than its CPU: "meta", whose tensors have no memory.
    "micro batches are not on the CPU": (
        '"labels": tokens[:, 1:].contiguous()',
        '"labels": tokens[:, 1:].to("meta")',
        lambda: Jotter().test_a_micro_batch_is_what_the_contract_says("train"),
        "'labels' is on 'meta'; a loader must yield CPU tensors, and the host moves them",
    ),
    "micro batches share memory": (
        '"sample_ids": torch.tensor(list(sample_ids))',
        '"sample_ids": self.__dict__.setdefault("ids", torch.tensor(list(sample_ids))).copy_(torch.tensor(sample_ids))',
        lambda: Jotter().test_a_micro_batch_stays_as_it_is_when_the_next_ones_are_read(),
        "sample 62 comes in the place of sample 0 after later micro batches are read",
    ),
    "the end of a document is beyond the vocabulary": (
        "vocab_size=VOCAB_SIZE,",
        "vocab_size=VOCAB_SIZE - 1,",
        lambda: Jotter().test_a_micro_batch_is_what_the_contract_says("train"),
        "in sample 11; values must be 0 to 254, because the loader's vocab_size is 255",
    ),
    "micro batches have a size of their own": (
        BEGINS,
        "begins = range(start, stop, 4)",
        lambda: Buffered().test_a_micro_batch_is_what_the_contract_says("train"),
        "9 samples come in micro batches of [2, 2, 1], not of [2, 2, 2, 2, 1]",
    ),
    "the samples of an unfinished micro batch are dropped": (
        BEGINS,
        "begins = range(start, stop - self.micro_batch_size + 1, self.micro_batch_size)",
        lambda: Buffered().test_a_micro_batch_is_what_the_contract_says("train"),
        "9 samples come in micro batches of [2, 2, 2, 2]",
    ),
    "labels are not shifted": (
        LABELS,
        '"labels": tokens[:, :-1].contiguous()',
        lambda: Jotter().test_labels_are_the_next_tokens("train"),
        "and the next token is",
    ),
    "labels wrap around": (
        LABELS,
        '"labels": tokens[:, :-1].roll(-1, dims=1)',
        lambda: Jotter().test_labels_are_the_next_tokens("train"),
        "the last label of every sample is the sample's first token",
    ),
    "samples are numbered by their windows": (
        '"sample_ids": torch.tensor(list(sample_ids))',
        '"sample_ids": torch.tensor(list(windows))',
        lambda: Jotter().test_samples_have_one_order_whatever_the_portions_and_micro_batches("train"),
        "they must number the global order",
    ),
    "a batch is read in the order of the file": (
        "drawn = [self._draw() for _ in range(num_samples)]",
        "drawn = sorted(self._draw() for _ in range(num_samples))",
        lambda: Buffered().test_samples_have_one_order_whatever_the_portions_and_micro_batches("train"),
        "if samples are taken in portions",
    ),
    "the order comes from global random numbers": (
        ORDER,
        "np.random.permutation(self.count)",
        lambda: Jotter().test_a_seed_gives_one_order_in_every_process(),
        "has different tokens if global random numbers have another state",
    ),
    "the order comes from the hash of a string": (
        ORDER,
        "np.random.default_rng([hash('jotter') % 2**32, epoch, self.seed]).permutation(self.count)",
        lambda: Jotter().test_a_seed_gives_one_order_in_every_process(),
        "has different tokens in another process with the same seed",
    ),
    "the seed is not used": (
        ORDER,
        "np.random.default_rng([0, epoch]).permutation(self.count)",
        lambda: Jotter().test_a_seed_gives_one_order_in_every_process(),
        "another trainer.seed gives the same order of 64 samples",
    ),
    "every rank reads the whole batch": (
        PARTS,
        "start, stop = 0, num_samples",
        lambda: Buffered().test_ranks_together_read_what_one_rank_reads(2, "train"),
        "ranks 0 and 1 both read sample 0",
    ),
    "one rank reads for all": (
        PARTS,
        "start, stop = (0, num_samples) if index == 0 else (0, 0)",
        lambda: Buffered().test_ranks_together_read_what_one_rank_reads(2, "train"),
        "the ranks read [8, 0] samples of a batch of 8; each reads as many as the others",
    ),
    "ranks leave a rest unread": (
        PARTS,
        "start, stop = (num_samples // count * part for part in (index, index + 1))",
        lambda: Buffered().test_ranks_together_read_what_one_rank_reads(2, "train"),
        "no rank reads sample 28",
    ),
    "a rank draws its own samples only": (
        "drawn = [self._draw() for _ in range(num_samples)]",
        "drawn = [self._draw() if index == 0 else 0 for _ in range(num_samples)]",
        lambda: Buffered().test_ranks_together_read_what_one_rank_reads(2, "train"),
        "sample 4 has different tokens on rank 1 (over 2 ranks)",
    ),
    "a rank's number is taken for its part of the batch": (
        SHARD,
        "shard, size = (run.rank, run.mesh.world_size), run.micro_batch_size",
        lambda: Jotter().test_ranks_that_split_the_model_read_the_same_samples(),
        "on rank 1, which splits the model with rank 0, and not the batch; use",
    ),
    "what waits in the buffer is not resumed": (
        LOADED,
        'self.samples, self.next = state["samples"], state["next"]',
        lambda: Buffered().test_it_resumes_exactly((1, 1), "train"),
        "sample 3 has different tokens on rank 0 after a resume on 1 rank from 1 samples on 1",
    ),
    "the state counts the samples of one rank": (
        '"samples": self.samples, "next"',
        '"samples": self.samples // self.shard[1], "next"',
        lambda: Buffered().test_it_resumes_exactly((4, 2), "train"),
        "after a resume on 2 ranks from 1 samples on 4",
    ),
    "the state is not plain": (
        '"buffer": torch.tensor(self.buffer, dtype=torch.int64)}',
        '"buffer": torch.tensor(self.buffer, dtype=torch.int64), "drawn": {self.samples}}',
        lambda: Buffered().test_its_state_is_small_plain_data(),
        "contains a set; use only tensors and plain data",
    ),
    "the state lists every sample so far": (
        '"buffer": torch.tensor(self.buffer, dtype=torch.int64)}',
        '"buffer": torch.tensor(self.buffer, dtype=torch.int64), "done": list(range(self.samples))}',
        lambda: Buffered().test_its_state_is_small_plain_data(),
        "its state grows with the samples",
    ),
    "the state is the loader's own": (
        STATE,
        'self.__dict__.setdefault("state", {}).update(samples=self.samples, next=self.next, '
        "buffer=torch.tensor(self.buffer)); return self.state",
        lambda: Buffered().test_its_state_is_a_snapshot(),
        "the state changes while the loader that returned it reads on",
    ),
    "an evaluation does not put the loader back": (
        LOADED,
        'self.samples = state["samples"]',
        lambda: Buffered().test_evaluating_leaves_training_alone(),
        "in the run's second evaluation",
    ),
    "an epoch is stated too long": (
        "samples_per_epoch=windows.count,",
        "samples_per_epoch=windows.count + 1,",
        lambda: Jotter().test_every_sample_comes_once_an_epoch("train"),
        "are the same in the first epoch, which must have each of its",
    ),
    "the data ends with its first epoch": (
        "for begin in begins]",
        "for begin in begins if first + begin < self.windows.count]",
        lambda: Buffered().test_every_sample_comes_once_an_epoch("train"),
        "the second epoch has 0 samples, and samples_per_epoch is",
    ),
    "windows are drawn with replacement": (
        ORDER,
        "np.random.default_rng([self.seed, epoch]).integers(self.count, size=self.count)",
        lambda: Jotter().test_every_sample_comes_once_an_epoch("train"),
        "are the same in the first epoch, which must have each of its",
    ),
    "every epoch has the same order": (
        ORDER,
        "np.random.default_rng([self.seed, 0]).permutation(self.count)",
        lambda: Jotter().test_every_sample_comes_once_an_epoch("train"),
        "the second epoch has the order of the first",
    ),
    "validation reads the training text": (
        'return self.validation if split == "validation" else self.train',
        "return self.train",
        lambda: Jotter().test_the_splits_share_no_text(),
        "validation sample 0 is in the training text",
    ),
    "the tokenizer drops what is not ASCII": (
        "return list(text.encode())",
        'return list(text.encode("ascii", "ignore"))',
        lambda: Jotter().test_text_survives_the_tokenizer(),
        "decoding the tokens of 'Grüße, 世界 🌍' gives 'Gre,  '",
    ),
    "a thread reads ahead for ever": (
        START,
        f"{START}; {THREAD}",
        lambda: Buffered().test_a_loader_leaves_nothing_running(),
        "a loader that is no longer used leaves the thread 'read-ahead' running",
    ),
    "a loader fails when it takes": (
        "slot = int(",
        "slot = str(",
        lambda: Buffered().test_labels_are_the_next_tokens("train"),
        "take(64): it raises TypeError",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches_a_loader_of_which(fault: str, plant: Callable[..., None]) -> None:
    old, new, check, words = FAULTS[fault]
    plant("nova-jotter", old, new)
    with pytest.raises(Fault) as caught:
        check()
    assert words in str(caught.value)


FIELDS = "test_every_field_of_its_config_has_an_effect"
FINGERPRINT = "test_its_fingerprint_is_that_of_its_samples"

OF_A_TABLE = {
    "the delimiter is ignored": (
        "delimiter=delimiter",
        'delimiter=","',
        FIELDS,
        "the field 'delimiter' of 'table' has no effect: with ';' the suite sees what it sees with ','; use the field",
    ),
    "the column is ignored": (
        "yield row[column]",
        'yield row["text"]',
        FIELDS,
        "the field 'column' of 'table' has no effect: with 'title' the suite sees what it sees with 'text'",
    ),
    "the fingerprint is that of the path": (
        "hashlib.sha256(stream)",
        "hashlib.sha256(config.path.encode())",
        FINGERPRINT,
        "a copy of the data in another place has another fingerprint",
    ),
    "the fingerprint is that of the name": (
        "hashlib.sha256(stream)",
        "hashlib.sha256(Path(config.path).name.encode())",
        FINGERPRINT,
        "data with other samples (the same lines in another order) has the same fingerprint",
    ),
    "the fingerprint is that of the size": (
        "hashlib.sha256(stream)",
        "hashlib.sha256(str(Path(config.path).stat().st_size).encode())",
        FINGERPRINT,
        "data with other samples (the same lines in another order) has the same fingerprint",
    ),
}


@pytest.mark.parametrize("fault", OF_A_TABLE)
def test_the_suite_catches_a_loader_of_tables_of_which(fault: str, plant: Callable[..., None]) -> None:
    old, new, test, words = OF_A_TABLE[fault]
    plant("nova-table", old, new)
    with pytest.raises(Fault) as caught:
        getattr(Table(), test)()
    assert words in str(caught.value)


def test_a_field_for_which_no_value_is_known_makes_the_suite_ask_for_one(plant: Callable[..., None]) -> None:
    plant("nova-table")
    getattr(Table(), FIELDS)()
    asking = r"no other value can be derived from its type .*examples = \{'column': \[\.\.\.\]\}"
    with pytest.raises(Fault, match=asking):
        getattr(WithoutExamples(), FIELDS)()
