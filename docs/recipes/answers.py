"""Count how many answers of a run are right, on a part of its data, and how many without the picture.

    python docs/recipes/answers.py --name shapes --part test --samples 400

An answer is a row of consecutive targets of a sample: the words of an answer and the token that ends it. It counts as
right if each of its tokens is the most probable one behind the true tokens before it. These are exactly the answers
that the model writes itself, by always choosing the most probable token, if the earlier answers of the conversation are
the true ones.

The second column has the same questions with pictures of other samples: those of the next sample of the micro batch. A
model that looks at its pictures then answers by chance. The third column is this chance: how often the other sample has
the same answer to the same question, in the data. A question is known by the text between the answer before and the
answer, without the tokens of pictures.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mplug import IGNORED, Model, Run, UsageError
from mplug.commands import find_directory, merge, read_assignments, run_units, saved_settings, settle
from mplug_pretrained import load_for_inference
from mplug_saving import at_step
from mplug_streams import Medium, Processor, Seen

Batch = Mapping[str, Tensor]


class Answer(NamedTuple):
    """A question, the true answer to it, both as tokens, and the place of the answer in the labels of the sample."""

    question: tuple[int, ...]
    tokens: tuple[int, ...]
    place: slice


def answers_of(tokens: Sequence[int], labels: Sequence[int], placeholders: frozenset[int]) -> Iterator[Answer]:
    """The answers of a sample, in order."""
    begin = 0
    while begin < len(labels):
        if labels[begin] == IGNORED:
            begin += 1
            continue
        end = next((at for at in range(begin, len(labels)) if labels[at] == IGNORED), len(labels))
        start = next((at + 1 for at in range(begin - 1, -1, -1) if labels[at] != IGNORED), 0)
        asked = tuple(token for token in tokens[start + 1 : begin + 1] if token not in placeholders)
        yield Answer(asked, tuple(labels[begin:end]), slice(begin, end))
        begin = end


def media_of(run: Run, batch: Batch) -> list[list[Seen]]:
    """The media of each sample, which the processor of the family restores from the micro batch."""
    if not hasattr(run.processor, "contents_of"):
        raise UsageError("the processor of this model cannot restore pictures from a micro batch (`contents_of`)")
    restored: list[list[Seen]] = run.processor.contents_of(batch)
    return restored


def with_other_media(processor: Processor, batch: Batch, own: list[list[Seen]]) -> Batch:
    """The micro batch, in which each sample has the media of the next one; they are prepared anew."""
    prepared = [[_prepared(processor, one, media) for one in media] for media in [*own[1:], *own[:1]]]
    return {**batch, **processor.entries_of(batch["tokens"], prepared, batch.get("document_lengths"))}


def _prepared(processor: Processor, one: Seen, among: list[Seen]) -> Medium:
    return processor.prepare(one.content, sum(len(seen.content) == 1 for seen in among))


@torch.no_grad()
def predicted(model: Model, batch: Batch) -> list[list[int]]:
    """The most probable token behind each position [B, S]."""
    given = {**batch, "keys": torch.zeros_like(batch["sample_ids"])}  # of dropout, which evaluation leaves out
    values: list[list[int]] = run_units(model.module, model.plan.inference, given)["logits"].argmax(dim=-1).tolist()
    return values


class Answered(NamedTuple):
    """A picture [H, W, 3] and what the model answers: question, answer, and whether it is right."""

    picture: Tensor
    answers: list[tuple[str, str, bool]]


def counts(run: Run, model: Model, samples: int, shown: list[Answered]) -> dict[tuple[str, str], Counter[str]]:
    """(question, answer) -> how many there are, and how many are right with their own and with other pictures.

    A sample that the loader repeats counts once. The samples with a picture are appended to `shown`.
    """
    tokenizer = run.hooks.call.build_tokenizer(run=run)
    found, read = dict[tuple[str, str], Counter[str]](), set[bytes]()
    loader = run.hooks.call.build_loader(run=run, split="validation")
    for batch in loader.take(samples):
        media = media_of(run, batch)
        own, other = predicted(model, batch), predicted(model, with_other_media(run.processor, batch, media))
        rows = zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True)
        answers = [list(answers_of(tokens, labels, run.processor.placeholders)) for tokens, labels in rows]
        for number, row in enumerate(answers):
            parts = [batch["tokens"][number], *(one.content for one in media[number])]
            key = b"".join(part.numpy().tobytes() for part in parts)
            if key in read:
                continue
            read.add(key)
            given = [(one, own[number][one.place]) for one in row]
            texts = [
                (_words(tokenizer, one.question), _words(tokenizer, had), tuple(had) == one.tokens)
                for one, had in given
            ]
            shown += [Answered(medium.content[0], texts) for medium in media[number][:1]]
            elsewhere = {_words(tokenizer, one.question): one.tokens for one in answers[(number + 1) % len(answers)]}
            for one in row:
                asked = _words(tokenizer, one.question)
                counted = found.setdefault((asked, _words(tokenizer, one.tokens)), Counter())
                counted["all"] += 1
                counted["own"] += tuple(own[number][one.place]) == one.tokens
                counted["other"] += tuple(other[number][one.place]) == one.tokens
                counted["chance"] += elsewhere.get(asked) == one.tokens
    return found


def drawn(shown: Sequence[Answered], columns: int = 6) -> Any:
    """A picture of samples with the answers of the model below them; wrong ones are red."""
    from PIL import Image, ImageDraw

    wide, line, scale = 190, 13, 2
    tall = max(one.picture.shape[0] for one in shown) * scale + line * (1 + max(len(one.answers) for one in shown))
    page = Image.new("RGB", (wide * min(columns, len(shown)), tall * -(-len(shown) // columns)), "white")
    pen = ImageDraw.Draw(page)
    for number, one in enumerate(shown):
        left, top = number % columns * wide + 4, number // columns * tall + 4
        height, width = (side * scale for side in one.picture.shape[:2])
        picture = Image.fromarray(one.picture.numpy(), "RGB").resize((width, height), Image.Resampling.NEAREST)
        page.paste(picture, (left, top))
        for row, (question, answer, is_right) in enumerate(one.answers):
            asked = question.removeprefix("user ").removesuffix(" assistant")
            pen.text((left, top + height + row * line), f"{asked} {answer}", fill="black" if is_right else "red")
    return page


def _words(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens on one line, without special tokens of the form `<|NAME|>` and those of the model alone."""
    known = [token for token in tokens if token < getattr(tokenizer, "vocab_size", token + 1)]
    return " ".join(re.sub(r"<\|[^|]*\|>", " ", tokenizer.decode(known)).split())


def main() -> None:
    """Print the share of right answers, by answer and in all."""
    parser = argparse.ArgumentParser(description="Count the right answers of a run about pictures.")
    parser.add_argument("--name", help="name of the run; default: the newest run")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest one")
    parser.add_argument("--part", help="part of the data set; default: that of validation")
    parser.add_argument("--samples", type=int, default=800, help="samples to read; repeated ones count once")
    parser.add_argument("--picture", help="PNG file for the first 12 pictures with the answers of the model")
    wanted = parser.parse_args()
    directory = find_directory(wanted.name)
    words = ["parallel.layout=", "trainer.compile=never", "trainer.device=cpu"]
    words += [f"data.validation_part={wanted.part}"] if wanted.part else []
    alone = read_assignments(words, "answers.py")
    run, _ = settle(merge(saved_settings(directory), alone), {}, None)
    run.trains, run.device = False, "cpu"
    model = load_for_inference(run, at_step(directory / "checkpoints", wanted.step))
    model.module.eval()
    shown = list[Answered]()
    found = counts(run, model, wanted.samples, shown)
    if wanted.picture and shown:
        drawn(shown[:12]).save(wanted.picture, "PNG")
    print(f"{'question and answer':<48}{'number':>8}{'right':>9}{'others':>9}{'chance':>9}")
    for (question, answer), counted in sorted(found.items()):
        print(_line(f"{question} | {answer}", counted))
    print(_line("all", sum(found.values(), Counter[str]())))


def _line(name: str, counted: Counter[str]) -> str:
    shares = (counted[kind] / max(counted["all"], 1) for kind in ("own", "other", "chance"))
    return f"{name[-47:]:<48}{counted['all']:>8}" + "".join(f"{share:>9.1%}" for share in shares)


if __name__ == "__main__":
    main()
