"""Every installed recipe is complete, and runs at toy size through the command line."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mplug.cli import main
from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug_settings import find_recipe

REGISTRY = Registry()
ROOT = Path(__file__).parents[1]
BUNDLED = [
    name
    for path in ROOT.glob("plugins/*/*/pyproject.toml")
    for name in tomllib.loads(path.read_text())["project"]["entry-points"].get("mplug.recipes", {})
]
RECIPES = sorted({*BUNDLED} & {*REGISTRY.names("recipes")})
VISION = "vision"
"""tests/test_recipes.py trains it with the drawn data set of docs/vision.md."""

TINY = {
    "trainer.device": "cpu",
    "trainer.steps": 2,
    "trainer.seq_length": 64,
    "trainer.micro_batch_size": 1,
    "trainer.global_batch_size": 4,
    "trainer.compile": "never",
    "trainer.eval_every": 0,
    "extensions.losspicture": False,
}
SHAPE = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 256,
}
"""A toy model in the place of a preset; the pretrained one is as small."""
CORPUS = {"data.name": "text", "data.path": "text.txt"}
ON_A_GPU = {
    "kernels.default": None,
    "kernels.attention": "reference",
    "kernels.norm_product": None,
    "kernels.activation_product": None,
    "trainer.graphs": False,
}
"""What the recipe 'fp8' has, and a CPU cannot: the products themselves are emulated."""
ENCODER: dict[str, object] = {**SHAPE, "model.vocab_size": 257, "model.window": 3}
TOYS: dict[str, dict[str, object]] = {
    "classes": {**ENCODER, "data.path": "classes.jsonl"},
    "continued-pretraining": {"checkpoint.pretrained": "model", "data.path": "text.txt"},
    "deepspeed": {"checkpoint.pretrained": "model", "data.path": "chats.jsonl", "parallel.layout": "deepspeed1"},
    "experts": {**SHAPE, **CORPUS, "model.num_kv_heads": 2, "parallel.layout": "ep1"},
    "fp8": {**SHAPE, **CORPUS, **ON_A_GPU},
    "long-context": {"checkpoint.pretrained": "model", "data.path": "text.txt", "parallel.layout": ""},
    "longer": {"checkpoint.pretrained": "model", "data.path": "chats.jsonl"},
    "lora": {"checkpoint.pretrained": "model", "data.path": "chats.jsonl"},
    "machines": {**SHAPE, **CORPUS, "model.num_kv_heads": 2, "parallel.layout": "fsdp1"},
    "masked": {**ENCODER, "data.of.path": "text.txt"},
    "needle": {**SHAPE, "model.vocab_size": 259, "data.path": "chats.jsonl"},
    "sft": {"checkpoint.pretrained": "model", "data.path": "chats.jsonl"},
    "spans": {"model.hidden_size": 32, "model.ffn_hidden_size": 48, "data.of.path": "text.txt"},
}
LAYOUTS = {"deepspeed": "deepspeed2", "experts": "ep2", "long-context": "cp2fsdp2", "machines": "fsdp2"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published folder of a tiny llama, conversations, and a text."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    import torch
    from byte_level import byte_level

    folder = tmp_path_factory.mktemp("recipes")
    tokenizer = byte_level(["How are you?"], "<s>", "</s>", size=270)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=270, **sizes, **heads))
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "!"}]} for n in range(30)
    ]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    lines = [{"text": f"def f{n}(): ...", "label": ("email", "xml")[n % 2]} for n in range(30)]
    (folder / "classes.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "text.txt").write_text("How are you? Fine, thanks. " * 100)
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def mplug(*words: str) -> str:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


def words(settings: dict[str, object]) -> list[str]:
    return [word for field, value in settings.items() for word in ("--set", f"{field}={json.dumps(value)}")]


def train_at_toy_size(name: str, **changes: object) -> dict[str, object]:
    """Train a recipe with a toy model; the record of the run."""
    mplug("train", "--recipe", name, "--name", "toy", *words({**TINY, **TOYS[name], **changes}))
    lines = [json.loads(line) for line in Path("runs/toy/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    record: dict[str, object] = json.loads(Path("runs/toy/record.json").read_text())
    return record


def test_every_bundled_recipe_has_a_toy_run() -> None:
    assert {*TOYS, VISION} == {*BUNDLED}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_complete_and_describes_itself(name: str) -> None:
    """Its settings are valid in full size, with the fields that it leaves to the user and no others."""
    recipe = find_recipe(REGISTRY, name)
    is_inside = ("data", "of", "name") in recipe.settings
    given = from_mapping("x", "--set", ("data", "of", "path") if is_inside else ("data", "path"))
    for field in recipe.given:
        given |= from_mapping("x", "--set", tuple(field.split(".")))
    if name == "longer":  # it sets a field of the folder's family
        given |= from_mapping("llama", "--set", ("model", "name"))
    assert recipe.given
    config = resolve(REGISTRY, default_settings(), {**recipe.settings, **given})
    chosen = {
        "trainer.steps",
        "trainer.seq_length",
        "trainer.global_batch_size",
        "optimizer.lr",
        "schedule.warmup_steps",
    }
    assert chosen <= {".".join(key) for key in recipe.settings}
    assert config.recipe is not None
    comments = [line for line in recipe.text.splitlines() if line.startswith("# ")]
    assert f"--recipe {name}" in " ".join(comments)
    needs = recipe.described("needs")  # a recipe that a CPU trains, too, is made for no number of GPUs
    assert ("recipe", "machine", "gpus") in recipe.settings or "GPU" not in needs or "CPU" in needs
    for field in ("summary", "needs", "reaches"):
        assert "\n" not in recipe.described(field)


def test_a_figure_of_a_recipe_is_on_the_page_that_it_names() -> None:
    """What a recipe reaches is measured, or it says that it is not."""
    docs = ROOT / "docs"
    for recipe in (find_recipe(REGISTRY, name) for name in RECIPES):
        reaches = recipe.described("reaches")
        numbers = [word for word in reaches.replace("%", " ").split() if "," in word.strip(",.") and word[0].isdigit()]
        pages = [page for page in docs.glob("*.md") if f"docs/{page.name}" in reaches]
        assert pages or reaches.startswith("not measured")
        text = " ".join(page.read_text() for page in pages)
        assert [number for number in numbers if number.strip(",.") not in text] == []


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("deepspeed", VISION)])
@pytest.mark.wide("session", quick=["experts", "spans", "sft"])
def test_a_recipe_trains_at_toy_size(name: str, here: Path) -> None:
    record = train_at_toy_size(name)
    recipe = find_recipe(REGISTRY, name)
    assert record["recipe"] == {"name": name, "origin": recipe.entry.origin}
    assert f"recipe:\n  name: {name}\n  origin: {recipe.entry.origin}\n" in (here / "runs/toy/config.yaml").read_text()


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name in RECIPES])
def test_a_recipe_with_a_layout_trains_at_toy_size_on_several_processes(name: str, here: Path) -> None:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    assert here.is_dir()
    record = train_at_toy_size(name, **{"parallel.layout": LAYOUTS[name]})
    assert str(record["layout"]).startswith(LAYOUTS[name])  # data parallelism is named behind experts


def test_a_resumed_run_keeps_the_name_of_its_recipe(here: Path) -> None:
    train_at_toy_size("lora")
    mplug("train", "--resume", "--name", "toy", "--set", "trainer.steps=3")
    assert json.loads((here / "runs/toy/record.json").read_text())["recipe"]["name"] == "lora"
    assert "recipe:\n  name: lora\n" in (here / "runs/toy/config.yaml").read_text()
