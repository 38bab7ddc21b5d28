"""Tokens per second and core: mplug data preprocess against what Megatron's tools/preprocess_data.py does.

That tool is in no package, so its way is written out here over megatron-core's own builder: a pool whose processes
parse and encode a line at a time, and a main process that adds each document. A tokenizer.json is read by
megatron-core's own class, over transformers, where that is installed; else, and for other tokenizers, a line is encoded
by the tokenizer that ours uses, too. Documents and output are the same; that both write the same bytes is checked.

    python benchmarks/preprocess.py texts.jsonl --tokenizer huggingface --tokenizer-file tokenizer.json

Both run in turn, several times, each in a process of its own; what counts is the processor time of all its processes
after their imports, so that another load on the machine weighs on both alike.
"""

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MEGATRON = "megatron.core"


def installed() -> bool:
    return importlib.util.find_spec(MEGATRON.partition(".")[0]) is not None


def options(arguments: argparse.Namespace) -> dict:
    return {"path": arguments.tokenizer_file} if arguments.tokenizer_file else {}


def processor_seconds() -> float:
    import resource

    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def ours(arguments: argparse.Namespace, prefix: Path) -> None:
    from mplug_indexed.preprocess.job import Job, preprocess
    from mplug_indexed.preprocess.sources import find_sources

    from mplug_tokenization import describe_tokenizer

    tokenizer = describe_tokenizer(arguments.tokenizer, options(arguments))
    sources = find_sources([arguments.texts], "jsonl", None)
    preprocess(Job(prefix, sources, tokenizer, append_eod=True, workers=arguments.workers, chunk_size=4 << 20))


def _build(record: Any, folder: str) -> None:
    global encode, eod
    from mplug_tokenization import load_tokenizer

    tokenizer = load_tokenizer(record)
    encode, eod = tokenizer.encode, tokenizer.eod
    if transformers_reads(record):
        from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

        encode = HuggingFaceTokenizer(folder, use_fast=True).text_to_ids


def transformers_reads(record: Any) -> bool:
    return record.name == "huggingface" and importlib.util.find_spec("transformers") is not None


def _encode(line: str) -> tuple[dict, dict, int]:
    tokens = encode(json.loads(line)["text"])
    tokens.append(eod)
    return {"text": tokens}, {"text": [len(tokens)]}, len(line)


def theirs(arguments: argparse.Namespace, prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    from mplug_tokenization import describe_tokenizer

    record = describe_tokenizer(arguments.tokenizer, options(arguments))
    if transformers_reads(record):
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(tokenizer_file=arguments.tokenizer_file).save_pretrained(f"{prefix}-tokenizer")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(record.vocab_size))
    with (
        Path(arguments.texts).open(encoding="utf-8") as lines,
        multiprocessing.get_context("fork").Pool(arguments.workers, _build, (record, f"{prefix}-tokenizer")) as pool,
    ):
        for documents, lengths, _ in pool.imap(_encode, lines, 32):
            builder.add_document(documents["text"], lengths["text"])
        pool.close()
        pool.join()
    builder.finalize(f"{prefix}.idx")


WAYS = {"mplug": ours, "megatron": theirs}


def one(arguments: argparse.Namespace) -> None:
    """One way, in this process: prints its seconds and processor seconds."""
    imported = ["mplug_indexed.preprocess.job"]
    if arguments.one == "megatron":
        imported = ["megatron.core.datasets.indexed_dataset"]
        if importlib.util.find_spec("transformers"):
            imported.append("megatron.core.tokenizers.text.libraries.huggingface_tokenizer")
    for module in imported:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    began, used = time.perf_counter(), processor_seconds()
    WAYS[arguments.one](arguments, Path(arguments.prefix))
    print(json.dumps([time.perf_counter() - began, processor_seconds() - used]))


def measure(way: str, arguments: argparse.Namespace, prefix: Path) -> tuple[float, float]:
    words = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--one", way, "--prefix", str(prefix)]
    finished = subprocess.run(words, capture_output=True, text=True)
    if finished.returncode != 0:
        sys.exit(f"{way}: {finished.stderr}")
    seconds, used = json.loads(finished.stdout.splitlines()[-1])
    return seconds, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--tokenizer-file")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments)
        return
    if not installed():
        print("megatron-core is not installed: pip install --no-deps megatron-core==0.16.1; nothing was measured")
        return
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            prefixes = {way: Path(folder) / f"{way}{number}" for way in WAYS}
            for way in WAYS if number % 2 else reversed(WAYS):
                found[way].append(measure(way, arguments, prefixes[way]))
            for suffix in (".bin", ".idx"):
                one_file, other = (Path(f"{prefix}{suffix}").read_bytes() for prefix in prefixes.values())
                assert one_file == other, f"they write different {suffix} files"
        index = Path(f"{prefixes['mplug']}.idx")
        from mplug_indexed.files import Reader

        tokens = int(Reader(index.with_suffix("")).lengths.sum())
    for way, rounds in found.items():
        seconds, used = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{way:<8}  {tokens / used:>12,.0f} tokens/s and core  {used:8.2f} s of processors  {seconds:8.2f} s")
    ratios = [theirs[1] / ours[1] for ours, theirs in zip(found["mplug"], found["megatron"], strict=True)]
    print(f"ratio     {statistics.median(ratios):.2f} (rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
