"""Indexed data beside Megatron Core's: the same files, indices, blends and samples, and how long each takes.

    python benchmarks/megatron_data.py compare [--record FILE]     1,000 random cases, every one equal or the run fails
    python benchmarks/megatron_data.py speed [--documents N]       ratios of times and of peak memory, in one run

Needs `megatron-core` (0.16.1 is what was compared) beside mplug and mplug-indexed. `--record` writes what Megatron Core
itself gives, as hashes: `plugins/data/indexed/tests/megatron.json`, which the plugin's tests compare with anywhere.
"""

import argparse
import hashlib
import json
import random
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from mplug_indexed.files import Reader, Writer, bin_path, idx_path
from mplug_indexed.indices import Cut, build_blend, build_indices, normalize, samples_of, total

EOD = 0
PAD = 1
RECORDED_BLENDS = 100


def hashed(*arrays: Any) -> str:
    """A hash of arrays, their types and shapes."""
    found = hashlib.sha256()
    for array in map(np.asarray, arrays):
        found.update(f"{array.dtype.name}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


# Cases, as plain data: the plugin's tests make the same files of them.


def draw_case(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    return {
        "seed": number,
        "documents": draw.choice([1, 2, 5, 20, 60]),
        "longest": draw.choice([1, 4, 30, 100]),
        "empty": draw.choice([0.0, 0.0, 0.3, 0.8]),
        "seq_length": draw.choice([1, 2, 7, 16, 64]),
        "extra": draw.choice([0, 1]),
        "keep_rest": draw.choice([False, False, True]),
        "epochs": draw.choice([None, 0.2, 1.0, 1.1, 1.75, 2.0, 2.3, 2.9, 5.05]),
    }


def lengths_of(case: dict[str, Any]) -> Any:
    """Lengths of a case's documents."""
    draw = np.random.default_rng(case["seed"])
    lengths = draw.integers(1, case["longest"] + 1, case["documents"])
    return np.where(draw.random(case["documents"]) < case["empty"], 0, lengths).astype(np.int32)


def samples_wanted(case: dict[str, Any], tokens: int) -> int | None:
    """The samples that a case asks for."""
    return None if case["epochs"] is None else max(1, int(case["epochs"] * tokens / case["seq_length"]))


def write_case(prefix: Path, case: dict[str, Any]) -> Path:
    """The files of a case: random tokens, of which many are EOD or padding."""
    lengths = lengths_of(case)
    with Writer(prefix, np.uint16) as writer:
        writer.add_documents(np.random.default_rng(case["seed"]).integers(0, 12, lengths.sum()), lengths)
    return prefix


# What Megatron Core gives.


def megatron() -> SimpleNamespace:
    warnings.simplefilter("ignore")
    from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset
    from megatron.core.datasets.utils import Split

    return SimpleNamespace(gpt=gpt_dataset, helpers=helpers, files=indexed_dataset, Split=Split)


def megatron_data_set(core: Any, prefix: Path, case: dict[str, Any], sequences: range, samples: int | None) -> Any:
    tokenizer = SimpleNamespace(eod=EOD, pad=PAD, vocab_size=100, unique_identifiers={"name": "none"})
    config = core.gpt.GPTDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        blend=([str(prefix)], None),
        split="1",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=not case["keep_rest"],
        add_extra_token_to_sequence=bool(case["extra"]),
    )
    split = core.Split.valid if case["keep_rest"] else core.Split.train
    indices = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    data = core.files.IndexedDataset(str(prefix))
    return core.gpt.GPTDataset(data, str(prefix), indices, samples, split, config)


def megatron_samples(data_set: Any) -> list[Any]:
    """Tokens, labels (-100 without loss) and positions of all samples, [N, S] each."""
    rows = [data_set[number] for number in range(len(data_set))]
    labels = [np.where(row["loss_mask"].numpy() > 0, row["labels"].numpy(), -100) for row in rows]
    return [
        np.stack([row["tokens"].numpy() for row in rows]),
        np.stack(labels),
        np.stack([row["position_ids"].numpy() for row in rows]),
    ]


# What we give.


def our_loader(prefix: Path, case: dict[str, Any], samples: int | None, folder: Path) -> Any:
    from mplug_indexed import Indexed

    from mplug import Mesh

    training = not case["keep_rest"]
    plugin = Indexed(
        Indexed.Config(
            path=str(prefix),
            split="1" if training else "0,1",
            samples=samples or "epoch",
            extra_token=bool(case["extra"]),
            drop_last=not case["keep_rest"],
            cache=str(folder),
            eod_token=EOD,
            pad_token=PAD,
            eod_mask_loss=True,
            reset_positions=True,
        )
    )
    config = SimpleNamespace(
        trainer=SimpleNamespace(
            seq_length=case["seq_length"],
            seed=case["seed"],
            eval_samples=samples,
            eval_every=0,
            steps=1,
            global_batch_size=1,
        ),
        model=SimpleNamespace(vocab_size=100),
    )
    run: Any = SimpleNamespace(config=config, mesh=Mesh.of([], 1), rank=0, micro_batch_size=7)
    return plugin.build_loader(run, "train" if training else "validation")


def our_samples(loader: Any) -> list[Any]:
    batches = list(loader.take(loader.order.size))
    return [np.concatenate([batch[name].numpy() for batch in batches]) for name in ("tokens", "labels", "positions")]


# Comparing.


def compare(record: Path | None, number: int) -> None:
    core = megatron()
    found: dict[str, Any] = {"megatron-core": version("megatron-core"), "numpy": np.__version__}
    with TemporaryDirectory() as folder:
        cases = (one for n in count() if (one := compare_indices(core, Path(folder), n)))
        found["indices"] = list(islice(cases, number))
        found["files"] = compare_files(core, Path(folder))
    found["blends"] = [compare_blend(core, n) for n in range(number)]
    equal = {name: len(found[name]) for name in ("indices", "files", "blends")}
    separate = sum(one["before_last"] is not None for one in found["indices"])
    print(f"equal: {equal}, of the indices {separate} with a separate last epoch")
    if record:
        found["blends"] = found["blends"][:RECORDED_BLENDS]
        record.write_text("{\n" + ",\n".join(f'"{name}": {rows(value)}' for name, value in found.items()) + "\n}\n")


def rows(value: Any) -> str:
    """JSON with an entry of a list a line."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"


def compare_indices(core: Any, folder: Path, number: int) -> dict[str, Any] | None:
    """The three indices, and every sample of each tenth case."""
    case = draw_case(number)
    lengths = lengths_of(case)
    first = number % 3 * len(lengths) // 10
    sequences = range(first, len(lengths))
    tokens, cut = total(lengths, sequences), Cut(case["seq_length"], case["extra"], case["keep_rest"])
    if tokens == 0 or cut.samples(tokens) < 1:
        return None
    samples = samples_wanted(case, tokens)
    prefix = write_case(folder / f"case{number}", case)
    try:
        data_set = megatron_data_set(core, prefix, case, sequences, samples)
    except AssertionError:  # padding after an empty last document has offset -1, which Megatron's own check refuses
        assert case["keep_rest"]
        return None
    theirs = [data_set.document_index, data_set.sample_index, data_set.shuffle_index]
    epochs = cut.epochs(tokens, samples)
    ours = build_indices(lengths, sequences, cut, epochs, case["seed"])
    for name, mine, other in zip(ours._fields, ours, theirs, strict=True):
        assert hashed(mine) == hashed(other), f"case {number}: {name} index differs: {case}"
    result = {**case, "first": first, "samples": samples, "before_last": epochs.before_last, "indices": hashed(*theirs)}
    if number % 10 == 0 and first == 0:
        expected = megatron_samples(data_set)
        loader = our_loader(prefix, case, samples, folder / "ours")
        for name, mine, other in zip(("tokens", "labels", "positions"), our_samples(loader), expected, strict=True):
            assert hashed(mine) == hashed(other), f"case {number}: {name} differ: {case}"
        result["read"] = hashed(*expected)
    return result


def compare_files(core: Any, folder: Path) -> list[dict[str, Any]]:
    """Written by either, read by the other; byte for byte the same."""
    import torch

    found = []
    for number, dtype in enumerate(
        (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)
    ):
        case = {**draw_case(number), "documents": 60, "longest": 30, "empty": 0.3}
        lengths = lengths_of(case)
        tokens = np.random.default_rng(number).integers(0, 100, lengths.sum()).astype(dtype)
        ours, theirs = folder / f"ours{number}", folder / f"theirs{number}"
        builder = core.files.IndexedDatasetBuilder(str(bin_path(theirs)), dtype=dtype)
        with Writer(ours, dtype) as writer:
            for document in np.split(tokens, np.cumsum(lengths)[:-1]):
                cut = len(document) // 3
                parts = [cut, len(document) - cut]
                writer.add_document(document, parts)
                builder.add_document(torch.from_numpy(document.astype(np.float64)), parts)
        builder.finalize(str(idx_path(theirs)))
        for path in (bin_path, idx_path):
            assert path(ours).read_bytes() == path(theirs).read_bytes(), f"{path(ours)} differs"
        read, reader = core.files.IndexedDataset(str(ours)), Reader(theirs)
        reader.verify()
        for sequence in range(len(reader)):
            np.testing.assert_array_equal(read[sequence], reader.read(sequence))
        files = [np.frombuffer(path(theirs).read_bytes(), dtype=np.uint8) for path in (bin_path, idx_path)]
        found.append({"seed": number, "dtype": np.dtype(dtype).name, "files": hashed(*files)})
    return found


def compare_blend(core: Any, number: int) -> dict[str, Any]:
    """Weighted and exhaustive blends in turn."""
    draw = random.Random(number)
    members, size = draw.choice([1, 2, 3, 10, 40]), draw.choice([1, 10, 333, 2000])
    exhaustive = number % 2 == 1
    if exhaustive:
        weights: list[Any] = [draw.randint(1, size) for _ in range(members)]
        size = sum(weights)
        ours, taken = build_blend(normalize(weights), size, weights)
        assert taken == weights
    else:
        weights = [draw.choice([1, 2, 0.1, 1e-6, draw.random() + 1e-9]) for _ in range(members)]
        size = sum(samples_of(size, normalize(weights)))
        ours, _ = build_blend(normalize(normalize(weights)), size)
    theirs = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    if exhaustive:
        core.helpers.build_exhaustive_blending_indices(*theirs, weights, members)
    else:
        core.helpers.build_blending_indices(*theirs, normalize(normalize(weights)), members, size, False)
    assert hashed(*ours) == hashed(*theirs), f"blend {number} differs: {weights}"
    return {"weights": weights, "size": size, "exhaustive": exhaustive, "blend": hashed(*theirs)}


# Speed.


def timed(function: Callable[[], Any]) -> float:
    """Seconds of CPU time in user mode: what one thread computes, on a busy machine too.

    Page faults are left out: they cost ten times as much for the process that touches a virtual machine's memory first.
    """
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - began


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def build_once(library: str, documents: int, epochs: int, seq_length: int) -> None:
    """In a process of its own: seconds and peak memory of the three indices of many documents, as JSON."""
    lengths = np.random.default_rng(1).integers(1, 1000, documents, dtype=np.int32)
    tokens = total(lengths, range(documents))
    samples = epochs * tokens // seq_length - 1
    cut = Cut(seq_length, 1)
    times = cut.epochs(tokens, samples)
    build_indices(lengths[:100], range(100), cut, cut.epochs(total(lengths, range(100)), None), 1)  # compiles
    core = megatron() if library == "megatron" else None
    before = peak_gib()
    if core is None:
        parts = {"all": timed(lambda: build_indices(lengths, range(documents), cut, times, 1))}
    else:
        parts = {"all": timed(lambda: megatron_indices(core, lengths, cut, times, tokens))}
    print(json.dumps({"seconds": parts["all"], "gib": peak_gib() - before}))


def megatron_indices(core: Any, lengths: Any, cut: Cut, epochs: Any, tokens: int) -> list[Any]:
    """What `GPTDataset` does where it finds no cache, with its own functions."""
    state, separate = np.random.RandomState(1), epochs.before_last is not None
    documents = np.arange(len(lengths), dtype=np.int32)
    document = core.gpt._build_document_index(documents, epochs.number, state, separate)
    arguments = (cut.seq_length, epochs.number, tokens, True, True)
    sample = core.helpers.build_sample_idx(lengths, document, *arguments)
    samples = len(sample) - 1
    return [document, sample, core.gpt._build_shuffle_index(epochs.before_last or samples, samples, state)]


def speed(documents: list[int], epochs: int) -> None:
    for number in documents:
        found = {}
        for library in ("ours", "megatron") * (3 if number < 10**7 else 1):
            command = [sys.executable, __file__, "build", "--library", library, "--documents", str(number)]
            command += ["--epochs", str(epochs)]
            line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            one = json.loads(line)
            best = found.setdefault(library, one)
            found[library] = {name: min(value, best[name]) for name, value in one.items()}
        print_ratios(f"indices of {number:,} documents, {epochs} epochs", found["ours"], found["megatron"])
    core = megatron()
    for members, size in ((2, 10**8), (8, 10**7), (32, 10**7), (300, 10**6)):
        print_ratios(f"blend of {members} data sets, {size:,} samples", *blend_seconds(core, members, size))
    with TemporaryDirectory() as folder:
        print_ratios("one reader, S=4096, documents of 500 tokens", *reader_seconds(core, Path(folder), 500, 4096))
        print_ratios("one reader, S=4096, documents of 20 tokens", *reader_seconds(core, Path(folder), 20, 4096))


def print_ratios(title: str, ours: dict[str, float], theirs: dict[str, float]) -> None:
    parts = [
        f"{name} {ours[name]:.3f} : {theirs[name]:.3f} = {ours[name] / max(theirs[name], 1e-9):.2f}" for name in ours
    ]
    print(f"{title}: {', '.join(parts)} (ours : Megatron Core's)", flush=True)


def blend_seconds(core: Any, members: int, size: int) -> tuple[dict[str, float], dict[str, float]]:
    weights = normalize(normalize((np.random.default_rng(1).random(members) + 0.01).tolist()))
    build_blend(weights, 10)
    times: dict[str, list[float]] = {"ours": [], "megatron": []}
    for _ in range(2):
        times["ours"].append(timed(lambda: build_blend(weights, size)))
        theirs = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
        helper = core.helpers.build_blending_indices
        times["megatron"].append(timed(lambda: helper(*theirs, weights, members, size, False)))  # noqa: B023
    return {"seconds": min(times["ours"])}, {"seconds": min(times["megatron"])}


def reader_seconds(core: Any, folder: Path, length: int, seq_length: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of 2,000 samples, from tokens in the page cache to tensors, in micro batches of 7 and one by one."""
    case = {"seed": 1, "seq_length": seq_length, "extra": 1, "keep_rest": False}
    documents = 30_000_000 // length
    lengths = np.random.default_rng(1).integers(1, 2 * length, documents)
    prefix = folder / f"corpus{length}"
    with Writer(prefix, np.uint16) as writer:
        writer.add_documents(np.random.default_rng(1).integers(2, 100, lengths.sum()).astype(np.uint16), lengths)
    loader = our_loader(prefix, case, None, folder / "ours")
    data_set = megatron_data_set(core, prefix, case, range(documents), None)
    list(loader.take(14))
    number = 2000
    times = [
        (timed(lambda: list(loader.take(number))), timed(lambda: [data_set[n] for n in range(number)])) for _ in "12"
    ]
    return tuple({"seconds": min(one)} for one in zip(*times, strict=True))  # type: ignore[return-value]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compare", "speed", "build"])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--documents", type=int, nargs="*", default=[10**6])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--library", choices=["ours", "megatron"])
    given = parser.parse_args()
    if given.what == "compare":
        compare(given.record, given.cases)
    elif given.what == "speed":
        speed(given.documents, given.epochs)
    else:
        build_once(given.library, given.documents[0], given.epochs, 2048)
