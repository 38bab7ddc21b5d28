"""mplug data look: the page shows the samples of the loader, their targets, and the pictures as the model sees them."""

import base64
import io
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from mplug_look.command import command
from mplug_look.page import page_of
from mplug_look.samples import samples_of

from mplug import IGNORED, UsageError
from mplug.commands import prepare, resolved
from mplug_streams import Seen
from mplug_testing import CommandSuite

Image = pytest.importorskip("PIL.Image")
TOWER = ("--model=qwen-vl", "--preset=tiny", "--data=mock")
MEDIA = ("data.media=3", "data.media_sides=[32, 90]", "model.vision.min_pixels=1024", "trainer.global_batch_size=4")


class TestLook(CommandSuite):
    plugin = "data.look"
    refused = (
        ("--samples", "0"),
        ("--data", "nowhere"),
        ("--output", "nowhere/page.html"),
        ("--data", "mock", "--set", "data.media=1"),
    )


class Page(HTMLParser):
    """The text of targets, of other tokens, and the pictures, in the order of the page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.shown = list[tuple[str, Any]]()
        self.classes = list[str]()
        self.loaded = list[str]()
        self.feed(text[text.index("<section>") :])

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loaded += [given[name] or "" for name in ("src", "href") if name in given]
        if tag == "img":
            data = base64.b64decode((given["src"] or "").removeprefix("data:image/png;base64,"))
            self.shown.append(("picture", np.array(Image.open(io.BytesIO(data)))))
        elif tag == "span":
            self.classes.append(given.get("class") or "read")

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self.classes.pop()

    def handle_data(self, data: str) -> None:
        if self.classes:
            self.shown.append((self.classes[-1], data))

    def joined(self, kind: str) -> str:
        return "".join(text for classes, text in self.shown if classes != "picture" and kind in classes.split())


class Words:
    """A tokenizer of whole words that omits the space at the beginning of a text, and has bytes from 100 on."""

    words = (" a", " <b>", " cat", "\n")
    special_tokens = {"<end>": 4}
    vocab_size = 356

    def decode(self, tokens: Sequence[int]) -> str:
        parts = [bytes([token - 100]) if token >= 100 else "".join(self.words[token:][:1]).encode() for token in tokens]
        return b"".join(parts).decode("utf-8", "replace").removeprefix(" ")


def batch_of(*rows: list[int], targets: Sequence[int] = (), **entries: Any) -> dict[str, Any]:
    tokens = torch.tensor(rows)
    labels = torch.full_like(tokens, IGNORED)
    for position in targets:
        labels[:, position - 1] = tokens[:, position]
    return {"tokens": tokens, "labels": labels, "sample_ids": torch.arange(7, 7 + len(rows)), **entries}


def page(batch: dict[str, Any], processor: Any = None, tokenizer: Any = None) -> Page:
    return Page(page_of("title", "origin", samples_of(batch, processor, tokenizer or Words()), {}))


def test_targets_are_marked_and_text_is_escaped() -> None:
    shown = page(batch_of([0, 1, 2, 3, 4, 0], targets=(2, 4)))
    assert shown.joined("target") == " cat<end>"
    assert shown.joined("read") == "a <b>↵\n a"


def test_the_target_behind_the_last_token_is_shown_and_one_that_is_not_the_next_token_is_marked() -> None:
    batch = batch_of([0, 1, 2])
    batch["labels"] = torch.tensor([[IGNORED, 300, 1]])
    shown = page(batch)
    assert [text for classes, text in shown.shown if classes == "label"] == ["<300>"]
    assert shown.joined("target") == " cat <b>"


def test_a_character_of_several_tokens_is_shown_whole_unless_a_target_begins_in_it() -> None:
    letter = [100 + byte for byte in "é".encode()]
    assert "é" in page(batch_of([2, *letter, 2])).joined("read")
    cut = page(batch_of([2, *letter, 2], targets=(2,)))
    assert "é" not in cut.joined("read") + cut.joined("target")


def test_borders_of_documents_are_shown_and_padding_is_shortened() -> None:
    batch = batch_of([0, 2, 0, 2, *[4] * 20], document_lengths=torch.tensor([[2, 2, 20, 0]]))
    shown = page(batch).shown
    assert [text for classes, text in shown if classes == "document"] == ["document"] * 3
    assert shown[-1] == ("token", "<end> × 20")


def test_a_token_without_a_text_is_shown_by_its_number() -> None:
    assert page(batch_of([0, 400, 2])).joined("token") == "<400>"
    assert page(batch_of([0, 1]), tokenizer=SimpleNamespace(decode=lambda _: "")).joined("token") == "<0><1>"


def test_pictures_stand_where_their_tokens_are() -> None:
    colours = torch.arange(2 * 4 * 6 * 3, dtype=torch.uint8).view(2, 4, 6, 3)
    seen = [[Seen((1, 2), colours[:1]), Seen((4,), colours)]]
    processor = SimpleNamespace(contents_of=lambda _: seen)
    shown = page(batch_of([0, 350, 350, 2, 351]), processor).shown
    assert [kind for kind, _ in shown] == ["read", "picture", "read", "picture", "picture"]
    pictures = [value for kind, value in shown if kind == "picture"]
    assert np.array_equal(np.stack(pictures), colours[[0, 0, 1]].numpy())


def test_the_command_shows_the_samples_of_the_run_and_the_pictures_of_its_processor(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assignments = [word for one in MEDIA for word in ("--set", one)]
    words = [*TOWER, *assignments, "--samples=5", "--skip=3", f"--output={output}"]
    finished = CliRunner().invoke(command, words, catch_exceptions=False)
    assert "wrote " in finished.output
    text = output.read_text()
    assert [f"Sample {number}:" in text for number in range(10)] == [3 <= number < 8 for number in range(10)]
    shown = Page(text)
    assert all(source.startswith("data:image/png;base64,") for source in shown.loaded)
    options = dict.fromkeys(("parallel", "optimizer", "precision", "pretrained", "attention", "file"))
    chosen = {"model": "qwen-vl", "preset": "tiny", "data": ("mock",), "kernels": (), "assignments": MEDIA}
    run = prepare(resolved(options | chosen))
    batches = list(run.hooks.call.build_loader(run=run, split="train").take(8))
    expected = [seen for batch in batches for own in run.processor.contents_of(batch) for seen in [own]][3:8]
    pictures = [one.content[0].numpy() for own in expected for one in own]
    found = [value for kind, value in shown.shown if kind == "picture"]
    assert len(pictures) > 3
    assert all(np.array_equal(one, other) for one, other in zip(found, pictures, strict=True))


def test_the_samples_of_text_are_those_of_the_loader(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the cat saw the <dog> " * 40)
    output = tmp_path / "page.html"
    words = ["--data=text", "--set", f"data.path={tmp_path}", "--set", "trainer.seq_length=16"]
    words += ["--set", "data.pattern=*.txt", "--set", "data.validation_percent=10", "--set", "trainer.eval_every=0"]
    CliRunner().invoke(command, [*words, "--samples=1", f"--output={output}"], catch_exceptions=False)
    assert len(Page(output.read_text()).joined("target")) == 16


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--output: there is no folder '.*nowhere' for 'page.html'; create it"):
        command.main([f"--output={tmp_path}/nowhere/page.html"], standalone_mode=False)
