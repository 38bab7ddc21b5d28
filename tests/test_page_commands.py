"""Each command of each page can be called: its options exist, and its settings make a run. Some are also run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from library_models import TABLES
from page_commands import COMMANDS, PAGES, ROOT, Shown, parsed, settle_as_train

from mplug.errors import UsageError
from mplug.registry.entry_points import Registry
from mplug_settings import find_recipe

FOLDERS = {"Qwen3-8B": "qwen3", "Qwen3-0.6B": "qwen3", "DIR": "llama", "my-model": "llama"}
FOLDERS |= {"STUDENT": "llama", "TEACHER": "llama"}
"""Folders of published models that pages name, each with the architecture of a tiny one."""
FILES = (
    "book.txt",
    "wiki.txt",
    "README.md",
    "notes.jsonl",
    "short.jsonl",
    "long.jsonl",
    "questions.jsonl",
    "questions.txt",
    "chats.jsonl",
    "beginnings.txt",
    "cat.jpg",
    "drawing.png",
)
MADE = ("ckpt", "folder", "tasks")
CONFIGS = {
    "run.yaml": "trainer: {steps: 10}",
    "blend.yaml": "data: {name: indexed, path: {texts: 0.7, docs: 0.3}}",
    "ds_config.json": "{}",
    "equation.jinja": "{% for one in messages %}{{ one.content }}{% endfor %}",
    "masked.yaml": "data: {name: masked, mask_token: 256, of: {name: text, path: book.txt}}",
    "spans.yaml": "data: {name: spans, end_token: 1, encoder_length: 64, of: {name: mock, vocab_size: 300}}",
}
"""Files that other commands of the pages write."""
ONLY_PARSED = {
    r"\bringo|acme|my_package": "a package that the reader writes",
    r"shapes/tokenizer\.json|model/tokenizer": "a tokenizer; tests/test_recipes.py runs the commands of docs/vision.md",
    r"Qwen3-VL|gemma-3-4b-it|clip-vit": "a published model that sees; the suites of these families read such folders",
    r"tokenizer_config\.json": "the template of a published model",
    r"s3://": "an object store",
    r"bert-base-uncased|flan-t5-base": "a published model with a tokenizer; the suites of its family read such folders",
}
"""Commands whose settings depend on files that this test has not."""


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with the files that pages name, as the current one."""
    folder = tmp_path_factory.mktemp("pages")
    for name, kind in FOLDERS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": kind, **TABLES["fields"]["kinds"][kind]}))
    for name in FILES:
        (folder / name).touch()
    for name in MADE:
        (folder / name).mkdir()
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    (folder / "lora.yaml").write_text(find_recipe(Registry(), "lora").text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("mplug.cli.options.local_path", lambda _: folder / "DIR")  # no address is read
        yield


def config_of(page: Path, name: str) -> str:
    """The config of this name that the page shows: the first block after a sentence or a comment with the name."""
    found = re.search(rf"(?:`{name}`|# {name}).*\n(?:.+\n)*\s*((?:    .*\n|\n(?=    ))+)", page.read_text())
    assert found, f"{page} does not show {name}"
    return re.sub(r"^    ", "", found[1], flags=re.MULTILINE)


@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if COMMANDS[page]], ids=lambda page: str(page.relative_to(ROOT))
)
def test_each_command_of_a_page_has_options_that_exist_and_settings_that_make_a_run(page: Path) -> None:
    for shown in dict.fromkeys(COMMANDS[page]):
        check(shown)


def check(shown: Shown) -> None:
    try:
        context = parsed(shown.words)
    except click.UsageError as error:
        pytest.fail(f"{shown}: {error.format_message()}")
    if shown.is_open or any(re.search(pattern, str(shown)) for pattern in ONLY_PARSED):
        return
    for name in ("fim.yaml", "pictures.yaml"):
        if name in shown.words:
            Path(name).write_text(config_of(shown.page, name))
    try:
        settle_as_train(context)
    except UsageError as error:
        if not shown.is_refused:
            pytest.fail(f"{shown}: {error}")


def test_the_check_refuses_what_does_not_exist() -> None:
    for words in (("trian",), ("train", "--stpes", "3"), ("data", "lok"), ("generate", "--top-k", "many")):
        with pytest.raises(click.UsageError):
            parsed(words)
    for words in (("train", "--set", "trainer.stpes=3"), ("bench", "--variant", "trainer.compile=often")):
        with pytest.raises(UsageError):
            settle_as_train(parsed(words))
    assert settle_as_train(parsed(("explain", "--parallel", "tp2"))) == 1
    assert sum(len(commands) for commands in COMMANDS.values()) > 300


def test_each_exception_is_still_needed() -> None:
    shown = "\n".join(str(command) for commands in COMMANDS.values() for command in commands)
    assert [pattern for pattern in ONLY_PARSED if not re.search(pattern, shown)] == []
