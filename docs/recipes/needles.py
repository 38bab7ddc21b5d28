"""Pass keys in long texts: data to train on, and how many a model finds, by the length of the text and the key's place.

    python docs/recipes/needles.py write needles.jsonl --length 128 --samples 20000
    python docs/recipes/needles.py measure --name short --lengths 128 256 512 1024 --json short.json

A sample is a conversation. Its question is a text of short sentences, one of which holds a key of four different
digits; its answer is the key (the task "passkey retrieval" of arXiv 2305.16300, a needle in a haystack). `--length` is
that of the whole sample in tokens, with the answer: bytes, and the marks of the chat template. The depth of a key is
the part of the text before it.

`measure` draws other texts and keys than `write`. An answer is right if each of its digits, and the mark at its end, is
the most probable token behind the true ones before it: then the model writes it itself, if it always takes that token.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILLERS = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is warm. ",
    "Here we go. ",
    "There and back again. ",
    "The river runs on. ",
    "A bird sits in the tree. ",
)
NEEDLE, QUESTION, DIGITS = "The key is {}. ", "The key is", 4
TEMPLATE = 24
"""At least the tokens of `chatml` around a question and its answer; a mark is one token, and each other byte."""
SHORTEST = 64
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def question(draw: random.Random, length: int, depth: float, key: str) -> str:
    """A text with a key, so long that the sample has at most `length` bytes, and less by at most a sentence."""
    needle = NEEDLE.format(key)
    room = length - TEMPLATE - len(needle) - len(QUESTION) - DIGITS
    if room < 0:
        raise SystemExit(f"--length {length} is too short for a key; use at least {length - room}")
    sentences = list[str]()
    while (left := room - sum(map(len, sentences))) >= min(map(len, FILLERS)):
        sentences.append(draw.choice([one for one in FILLERS if len(one) <= left]))
    sentences.insert(round(depth * len(sentences)), needle)
    return "".join(sentences) + QUESTION


def drawn_key(draw: random.Random) -> str:
    """Digits that differ: a text says only once what follows each of them, so a key can be copied step by step."""
    return "".join(draw.sample("0123456789", DIGITS))


def conversation(draw: random.Random, length: int, depth: float) -> dict[str, object]:
    """A question with a key, and the key."""
    key = drawn_key(draw)
    asked = {"role": "user", "content": question(draw, length, depth, key)}
    return {"messages": [asked, {"role": "assistant", "content": key}]}


def conversations(seed: str, length: int, samples: int) -> Iterator[dict[str, object]]:
    """Samples with keys at random depths.

    Every fourth sample has `length`, as those that `measure` asks for. The logarithms of the other lengths are uniform:
    short samples have more answers for as many tokens.
    """
    draw = random.Random(seed)
    for number in range(samples):
        shorter = round(SHORTEST * (length / SHORTEST) ** draw.random())
        yield conversation(draw, shorter if number % 4 else length, draw.random())


def write(wanted: argparse.Namespace) -> None:
    """Write a file of conversations."""
    with Path(wanted.file).open("w", encoding="utf-8") as out:
        for one in conversations(f"train {wanted.seed}", wanted.length, wanted.samples):
            out.write(json.dumps(one) + "\n")


def measure(wanted: argparse.Namespace) -> None:
    """Print the share of keys that a run finds, a row for each depth, a column for each length."""
    shares = {str(length): found(wanted, length) for length in wanted.lengths}
    print(f"{'depth':>6}" + "".join(f"{int(length):>8,}" for length in shares))
    for row, depth in enumerate(DEPTHS):
        print(f"{depth:>6.0%}" + "".join(f"{column[row]:>8.0%}" for column in shares.values()))
    mean = [sum(column) / len(column) for column in shares.values()]
    print(f"{'all':>6}" + "".join(f"{share:>8.0%}" for share in mean))
    if wanted.json:
        Path(wanted.json).write_text(json.dumps({"depths": DEPTHS, "shares": shares}) + "\n")


def found(wanted: argparse.Namespace, length: int) -> list[float]:
    """The share of keys that a run finds in texts of a length, for each depth."""
    from mplug.commands import find_directory, merge, read_assignments, saved_settings, settle
    from mplug_pretrained import load_for_inference
    from mplug_saving import at_step

    directory, draw = find_directory(wanted.name), random.Random(f"measure {length}")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.jsonl" for number in range(len(DEPTHS))]
        for file, depth in zip(files, DEPTHS, strict=True):
            asked = (conversation(draw, length, depth) for _ in range(wanted.samples))
            file.write_text("".join(json.dumps(one) + "\n" for one in asked))
        words = ["parallel.layout=", "trainer.compile=never", "trainer.device=cpu", "trainer.micro_batch_size=1"]
        saved = merge(saved_settings(directory), read_assignments([*words, f"trainer.seq_length={length}"], "needles"))
        model, shares = None, []
        for file in files:
            run, _ = settle(merge(saved, read_assignments([f"data.validation_path={file}"], "needles")), {}, None)
            run.trains, run.device = False, "cpu"
            if model is None:
                model = load_for_inference(run, at_step(directory / "checkpoints", wanted.step))
                model.module.eval()
            shares.append(share_of_right(run, model, wanted.samples))
    return shares


def share_of_right(run: Any, model: Any, samples: int) -> float:
    """The share of a run's validation samples of one answer each that a model answers right."""
    import torch

    from mplug import IGNORED
    from mplug.commands import run_units

    right = 0
    for batch in run.hooks.call.build_loader(run=run, split="validation").take(samples):
        given = {**batch, "keys": torch.zeros_like(batch["sample_ids"])}  # of dropout, which evaluation leaves out
        with torch.no_grad():
            best = run_units(model.module, model.plan.inference, given)["logits"].argmax(dim=-1)
        targets = batch["labels"] != IGNORED
        if int(targets.sum(dim=-1).min()) < DIGITS:
            raise SystemExit("a sample has no whole answer: the run's tokenizer or template makes the texts longer")
        right += int(((best == batch["labels"]) | ~targets).all(dim=-1).sum())
    return right / samples


def main() -> None:
    """Write data, or measure a run."""
    parser = argparse.ArgumentParser(description="Pass keys in long texts.")
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write", help="write conversations in JSON lines")
    writing.add_argument("file")
    writing.add_argument("--length", type=int, required=True, help="tokens of the longest sample")
    writing.add_argument("--samples", type=int, default=20000)
    writing.add_argument("--seed", type=int, default=1)
    writing.set_defaults(call=write)
    measuring = commands.add_parser("measure", help="count the keys that a run finds")
    measuring.add_argument("--name", help="name of the run; default: the newest run")
    measuring.add_argument("--step", type=int, help="step of a checkpoint; default: the newest one")
    measuring.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024])
    measuring.add_argument("--samples", type=int, default=20, help="keys for each length and depth")
    measuring.add_argument("--json", help="file for the shares")
    measuring.set_defaults(call=measure)
    wanted = parser.parse_args()
    wanted.call(wanted)


if __name__ == "__main__":
    main()
