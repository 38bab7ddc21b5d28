"""The commands of the main pages run one after another, as a reader calls them: with fewer steps, and small files.

`pytest --wide session` runs them. What needs a GPU, a published model, more than two processes or a library's download
is left out; tests/test_page_commands.py checks its options and settings.
"""

import ast
import json
import re
import subprocess
import sysconfig
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from page_commands import Shown, commands_of

ROOT = Path(__file__).parent.parent
Cli = Callable[..., subprocess.CompletedProcess[str]]
LEFT_OUT = {
    r"Qwen3|--pretrained DIR|lm-eval": "a published model, or tasks from the network",
    r"triton|quack|fp8": "a GPU",
    r"tp4pp2|pp4|dp2tp2|tp8pp8": "more than two processes",
    r"acme|data (merge|verify|blend web)": "files and packages that the page only names",
}
BEFORE = {
    "docs/looking.md": ["--name first", "--name second", "--name base", "--name pipeline"],
    "docs/evaluation.md": ["--name first"],
    "docs/sampling.md": [
        "--name first",
        "--name chat --data packed --set data.path=chats.jsonl --set model.vocab_size=259",
    ],
}
"""Runs that a page takes for granted, by the options with which they are trained."""
PAGES = ["README.md", "docs/precision.md", "docs/preprocess.md"]
PAGES += ["docs/recipes.md", *BEFORE]
SHORT = ["--set", "trainer.eval_samples=8", "--set", "trainer.seq_length=128"]


def texts(count: int) -> list[str]:
    """Docstrings of the standard library."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trees = (ast.parse(path.read_bytes()) for path in modules)
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
    return [*islice(filter(None, map(ast.get_docstring, nodes)), count)]


def write_files(folder: Path) -> None:
    """The files that the pages read."""
    found = texts(2000)
    for name in ("book.txt", "README.md", "src/main.c", "corpus/page.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n\n".join(found[:400]))
    for name in ("texts.jsonl", "docs.jsonl", "notes.jsonl"):
        (folder / name).write_text("\n".join(json.dumps({"text": text}) for text in found))
    turns = [[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text[:60]}] for text in found[:200]]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    (folder / "beginnings.txt").write_text("It was \nThe \n")


def shortened(shown: Shown, steps: int) -> list[str]:
    """The words of a command; a run ends after this step."""
    words = list(shown.words)
    if words[0] == "train" and not shown.is_refused:
        resumed = ["--set", "trainer.eval_samples=8"] if "--resume" in words else SHORT
        words += [*resumed, "--set", f"trainer.steps={steps}"]
    return ["32" if before == "--tokens" else word for before, word in zip(["", *words], words, strict=False)]


@pytest.mark.wide("session")
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_its_order(page: str, tmp_path: Path, cli: Cli) -> None:
    write_files(tmp_path)
    for words in BEFORE.get(page, []):
        trained = cli("train", *words.split(), *SHORT, "--steps", "2")
        assert trained.returncode == 0, trained.stderr
    shown = [one for one in commands_of(ROOT / page) if not one.is_open]
    run = [one for one in shown if not any(re.search(pattern, str(one)) for pattern in LEFT_OUT)]
    assert len(run) >= 2
    for number, one in enumerate(run):
        result = cli(*shortened(one, 2 * number + 4))
        assert result.returncode == (2 if one.is_refused else 0), f"{one}\n{result.stdout}\n{result.stderr}"
        if one.words[:2] == ("config", "show") and one.words[-1] == "show":
            (tmp_path / "run.yaml").write_text(result.stdout)  # the page redirects it


def test_every_reason_to_leave_a_command_out_is_one_of_a_shown_command() -> None:
    shown = "\n".join(str(one) for page in PAGES for one in commands_of(ROOT / page))
    assert [pattern for pattern in LEFT_OUT if not re.search(pattern, shown)] == []
