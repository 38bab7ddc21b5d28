"""The commands of every page run in their order, as a reader calls them: with fewer steps, small models and files.

`pytest --wide session` runs them. `shortened` is the rule by which a command becomes small. `PAGES_LEFT_OUT` and
`LEFT_OUT` list what is not run, each with its reason; tests/test_page_commands.py checks its options and settings.
"""

import ast
import json
import re
import sysconfig
from itertools import islice
from math import prod
from pathlib import Path

import pytest
from command_line import Cli
from page_commands import COMMANDS, ROOT, Shown

GPU = "a GPU, and libraries for it; pytest -m gpu tests them"
PAGES_LEFT_OUT = {
    "docs/graphs.md": GPU,
    "docs/performance.md": "the GPUs whose figures it shows",
    "docs/machines.md": "several machines; the wide set `machines` runs launchers",
    "docs/stores.md": "an object store; the tests of plugins/extensions/store run its commands on a local server",
    "docs/energon.md": "data sets of pictures; the tests of plugins/data/energon make some",
    "docs/vision.md": "tests/test_recipes.py runs the whole page",
    "docs/plugins-tutorial.md": "a package that the reader writes; the wide set `scaffold` installs and tests one",
    "docs/testing-under-layouts.md": "a package that the reader writes",
    "docs/writing-a-model.md": "a package that the reader writes",
    "docs/writing-a-strategy.md": "a package that the reader writes",
    "docs/installing.md": "it changes files in the reader's home; the tests of plugins/commands/completion have one",
    "graphs/README.md": GPU,
    "plugins/commands/completion/README.md": "it changes files in the reader's home; its tests have one",
    "plugins/commands/lm-eval/README.md": "tasks from the network",
    "plugins/data/datasets/README.md": "files that the page only names; its tests write some",
    "plugins/extensions/store/README.md": "an object store; its tests run a local server",
    "plugins/kernels/flash/README.md": GPU,
    "plugins/kernels/flex/README.md": GPU,
    "plugins/kernels/fp8/README.md": GPU,
    "plugins/kernels/quack/README.md": GPU,
    "plugins/kernels/te/README.md": GPU,
    "plugins/kernels/triton/README.md": GPU,
}
"""Pages of which no command runs, each with what their commands need."""
LEFT_OUT = {
    r"triton|quack|fp8|flash|flex|cudnn": GPU,
    r"offload": GPU,
    r"lm-eval": "tasks from the network",
    r"Qwen3-VL|gemma-3-4b-it|clip-vit": "a published model that sees",
    r"bert-base-uncased|flan-t5": "a published model with a tokenizer",
    r"mails|functions\.jsonl|pairs\.jsonl|--name tuned|of\.path=corpus": "files that the page only names",
    r"kernels/fla": GPU,
    r"llava|qwen-vl --parallel|2-9b": "a model of a real size",
    r"granite|nemotron|kimi-linear|gemma --preset 3-270m": "a model of a real size",
    r"blend\.yaml": "corpora that the page only names",
    r"profile\.first=100": "a run of more than 100 steps",
    r"models/t5": "a model of a real size",
    r"deepseek|gpt-oss|3-30b|mixtral --preset 8b": "a model of a real size",
    r"bench .*1\.7b|bench .*2-7b|bench --model gpt": "a model of a real size",
    r"acme|data (merge|verify|blend web)|wiki_text": "files and packages that the page only names",
    r"llama\.model|r50k_base": "published tokenizers",
    r"checkpoint import|contact-sheet|--config fim": "files that the page only names",
    r"corpus_text_document|data.path=corpus$": "a corpus that the page only names",
    r"deepspeed": "DeepSpeed; the wide set `layouts` trains with it",
    r"wandb|mlflow": "libraries of trackers; the wide set `loggers` reads what they wrote",
    r"yardstick": "the wide set `compile` runs the yardstick",
    r"docs/packed.md: .*my-model": "a run that began with a published checkpoint, as that of docs/huggingface.md",
    r"docs/checkpoints.md: .*--resume --name first": "a damaged checkpoint; tests/test_faults.py damages them",
}
"""Commands that are not run, by patterns of 'PAGE: COMMAND', each with what it needs."""
TUNED = "train --data packed --set data.path=chats.jsonl --pretrained DIR --adapt lora"
CHAT = "train --name chat --data packed --set data.path=chats.jsonl --set model.vocab_size=259"
FIRST, BASE = "train --name first", "train --name base"
BEFORE = {
    "docs/checkpoints.md": [FIRST, BASE],
    "docs/evaluation.md": [
        FIRST,
        f"{TUNED} --name t --set adapters.lora.rank=8",
        "checkpoint export --to peft TRAINED --name t",
    ],
    "docs/frozen.md": [BASE],
    "docs/huggingface.md": [f"{TUNED} --name chat", f"{TUNED} --name RUN"],
    "docs/looking.md": [FIRST, "train --name second", BASE, "train --name pipeline"],
    "docs/sampling.md": [FIRST, CHAT],
    "docs/training.md": [FIRST],
    "checkpoint/README.md": ["train --name first --pretrained DIR --data book.txt"],
    "plugins/adapters/lora/README.md": [f"{TUNED} --name RUN"],
    "plugins/commands/evaluate/README.md": [FIRST],
    "plugins/commands/generate/README.md": [FIRST],
    "plugins/commands/look/README.md": [],
    "plugins/commands/report/README.md": [FIRST, "train --name second"],
    "plugins/formats/huggingface/README.md": [f"{TUNED} --name chat"],
}
"""Commands after which a page begins."""
PAGES = [str(page.relative_to(ROOT)) for page in COMMANDS if COMMANDS[page]]
MOST_RANKS = 4
"""Processes of the largest layout that is run."""
SHORT = ["--set", "trainer.eval_samples=8", "--set", "trainer.seq_length=128"]
SMALL = ("num_layers=4", "hidden_size=64", "num_attention_heads=4", "num_kv_heads=2", "ffn_hidden_size=96")
"""The sizes in the place of those of a preset or a family that a page trains."""


def texts(count: int) -> list[str]:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trees = (ast.parse(path.read_bytes()) for path in modules)
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
    return [*islice(filter(None, map(ast.get_docstring, nodes)), count)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny published models, with the names that pages use."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    import torch
    from byte_level import byte_level

    folder = tmp_path_factory.mktemp("published")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(texts(20), "<s>", "</s>", size=270), bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = (
        "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "max_position_embeddings": 4096}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 270}
    torch.manual_seed(1)
    for name, kind in {"DIR": "Llama", "Qwen3-8B": "Qwen3", "Qwen3-0.6B": "Qwen3"}.items():
        more = {"head_dim": 16} if kind == "Qwen3" else {}
        config = getattr(transformers, f"{kind}Config")(**sizes, **more)
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder


def write_files(folder: Path, published: Path) -> None:
    """The files that the pages read."""
    for one in published.iterdir():
        (folder / one.name).symlink_to(one)
    found = texts(2000)
    for name in ("book.txt", "wiki.txt", "README.md", "src/main.c", "corpus/page.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("\n\n".join(found[:400]))
    for name in ("texts.jsonl", "docs.jsonl", "notes.jsonl"):
        (folder / name).write_text("\n".join(json.dumps({"text": text}) for text in found))
    turns = [[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text[:60]}] for text in found[:200]]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    (folder / "chats").mkdir()
    (folder / "chats" / "some.jsonl").write_text((folder / "chats.jsonl").read_text())
    (folder / "beginnings.txt").write_text("It was \nThe \n")
    (folder / "questions.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    (folder / "run.yaml").write_text("trainer: {steps: 3, eval_samples: 8}")
    (folder / "masked.yaml").write_text("data: {name: masked, mask_token: 256, of: {name: text, path: book.txt}}")
    spans = "data: {name: spans, end_token: 1, encoder_length: 64, of: {name: mock, vocab_size: 300}}"
    (folder / "spans.yaml").write_text(spans)


def smaller_layout(word: str) -> str:
    """A layout with degrees of at most 2."""
    return re.sub(r"(?<=[a-z])\d+", lambda found: str(min(int(found[0]), 2)), word)


def shortened(words: tuple[str, ...], steps: int, folder: Path, is_refused: bool = False) -> list[str]:
    """The words of a command that takes seconds.

    A run ends after step `steps` and has short samples; the degrees of its layout are at most 2; a preset of a real
    size, or a family's own default, keeps its form and gets the sizes `SMALL`. 'mplug bench' measures one step. Sampled
    texts have 32 tokens. The step of a checkpoint is that of the newest one.
    """
    saved = sorted(int(path.name.removeprefix("step_")) for path in folder.glob("runs/*/checkpoints/step_*"))
    instead = {"--tokens": "32", "--step": str(saved[-1] if saved else 0)}
    pairs = list(zip(["", *words], words, strict=False))
    found = [smaller_layout(word) if before == "--parallel" else instead.get(before, word) for before, word in pairs]
    found = [re.sub(r"^(trainer\.steps)=\d+$", rf"\1={steps}", word) for word in found]
    if words[0] in ("train", "bench") and not is_refused:
        options = dict(pairs)
        preset = options.get("--preset", "tiny" if options.get("--model", "gpt") == "gpt" else "of a real size")
        if not preset.startswith("tiny"):
            found += [word for size in SMALL for word in ("--set", f"model.{size}")]
        given = {word.partition("=")[0] for word in words}
        short = [word for word in SHORT[1::2] if word.partition("=")[0] not in given]
        short = short[:1] if "--resume" in words else short
        found += [word for one in short for word in ("--set", one)]
        found = _without(found, "--steps", "--warmup", "--rounds", "--batch-size", "--seq-length")
    if words[0] == "bench":
        return [*found, "--steps", "1", "--warmup", "1"]
    ended = words[0] == "train" and not is_refused and not any(word.startswith("trainer.steps=") for word in words)
    return [*found, "--set", f"trainer.steps={steps}"] if ended else found


def _without(words: list[str], *options: str) -> list[str]:
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if word not in options and before not in options]


def reason_against(page: str, shown: Shown) -> str | None:
    """Why a command is not run."""
    if shown.is_open:
        return "the page leaves a part of it to the reader"
    if "--parallel" in shown.words and shown.words[0] in ("train", "bench", "generate", "evaluate"):
        layout = smaller_layout(shown.words[shown.words.index("--parallel") + 1])
        if prod(int(degree) for degree in re.findall(r"\d+", layout)) > MOST_RANKS:
            return f"more than {MOST_RANKS} processes, although each degree is at most 2"
    where = f"{page}: {shown}"
    return next((reason for pattern, reason in LEFT_OUT.items() if re.search(pattern, where)), None)


def run_of(page: str) -> list[Shown]:
    """The commands of a page that are run."""
    return [one for one in COMMANDS[ROOT / page] if page not in PAGES_LEFT_OUT and reason_against(page, one) is None]


@pytest.mark.wide("session")
@pytest.mark.parametrize("page", [page for page in PAGES if run_of(page)])
def test_the_commands_of_a_page_run_in_its_order(page: str, published: Path, tmp_path: Path, cli: Cli) -> None:
    write_files(tmp_path, published)
    faults = []
    for number, words in enumerate(BEFORE.get(page, [])):
        made = cli(*shortened(tuple(words.split()), 2 + number, tmp_path))
        assert made.returncode == 0, made.stderr
    for number, one in enumerate(run_of(page)):
        words = shortened(one.words, number + 6, tmp_path, one.is_refused)
        result = cli(*words)
        if result.returncode != (2 if one.is_refused else 0):
            faults.append(f"{one}\n  ran as: {' '.join(words)}\n{result.stdout[-1500:]}\n{result.stderr[-3000:]}")
        if one.words[:2] == ("config", "show") and one.words[-1] == "show":
            (tmp_path / "run.yaml").write_text(result.stdout)  # the page redirects it
    assert not faults, "\n\n".join(faults)


def test_every_reason_to_leave_a_page_or_a_command_out_is_one_of_a_shown_command() -> None:
    assert [page for page in PAGES_LEFT_OUT if page not in PAGES] == []
    shown = "\n".join(f"{page}: {one}" for page in PAGES for one in COMMANDS[ROOT / page])
    assert [pattern for pattern in LEFT_OUT if not re.search(pattern, shown)] == []
    assert sum(len(run_of(page)) for page in PAGES) > 200
