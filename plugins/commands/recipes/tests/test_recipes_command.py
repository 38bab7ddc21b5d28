"""mplug recipes, --recipe, and recipes of other distributions."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from distributions import installed

from mplug.cli import main

PACKAGE = "nova_cookery"
RECIPE = """# A run of two steps.
recipe:    # what it is
  summary: A short run
  needs: nothing
  reaches: not measured
  give:
    data.path: "a text: --set data.path=FILE"
trainer:
  steps: 2    # few
  seq_length: 32
optimizer:
  lr: 0.5
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def shown(*words: str) -> str:
    done = run(*words)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


def refused(*words: str) -> str:
    done = run(*words)
    assert done.exit_code == 2, f"{done.output}\n{done.exception!r}"
    return done.output


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a distribution with recipes, and work in a folder of its own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def prepended(distribution: str = "nova-cookery", requires: str = ">=0.1,<0.2", **recipes: str) -> None:
        package, site = distribution.replace("-", "_"), tmp_path / distribution
        folder = site / package / "recipes"
        folder.mkdir(parents=True)
        (site / package / "__init__.py").write_text("raise RuntimeError('listing imports no plugin')")
        entries = "".join(f"{name} = {package}.recipes\n" for name in recipes)
        installed(site, distribution, f"[mplug.recipes]\n{entries}", requires=f"mplug{requires}")
        for name, text in recipes.items():
            if text:
                (folder / f"{name}.yaml").write_text(text)
        monkeypatch.syspath_prepend(site)

    return prepended


def test_the_recipes_of_other_distributions_are_listed_shown_and_used(install: Callable[..., None]) -> None:
    install(short=RECIPE)
    assert "short: A short run\n    needs: nothing\n" in shown("recipes", "list")
    text = shown("recipes", "show", "short")
    assert text.endswith(RECIPE)
    assert "# Train with it: mplug train --recipe short --set data.path=FILE\n" in text
    config = yaml.safe_load(shown("config", "show", "--recipe", "short", "--set", "data.path=x"))
    assert (config["trainer"]["steps"], config["optimizer"]["lr"]) == (2, 0.5)
    assert config["recipe"] == {"name": "short", "origin": "nova-cookery 1.0"}


def test_a_recipe_lies_under_the_file_and_the_options_and_over_the_defaults(install: Callable[..., None]) -> None:
    install(short=RECIPE)
    Path("own.yaml").write_text("trainer: {steps: 3, seq_length: 64}\ndata: {path: own.txt}\n")
    words = ("--recipe", "short", "--config", "own.yaml", "--set", "trainer.steps=4", "--sources")
    rows = [re.split(r"\s{2,}", line) for line in shown("config", "show", *words).splitlines() if line]
    found = {row[0]: (row[1], row[-1]) for row in rows}
    assert found["trainer.steps"] == ("4", "--set")
    assert found["trainer.seq_length"] == ("64", "own.yaml:1")
    assert found["optimizer.lr"] == ("0.5", "recipe short:12")
    assert found["trainer.log_every"][1].startswith("default.yaml:")
    assert found["recipe.name"] == ('"short"', "--recipe")


def test_a_field_that_the_recipe_leaves_to_the_user_is_asked_for_once(install: Callable[..., None]) -> None:
    install(short=RECIPE)
    message = refused("train", "--recipe", "short")
    assert message.count("data.path") == 2
    assert "data.path (recipe short:7): the recipe leaves this field to you: a text: --set data.path=FILE" in message
    assert "leaves this field" in refused("train", "--recipe", "short", "--set", "data.path=null")
    asked = refused("train", "--recipe", "sft").splitlines()
    assert [line.split()[0] for line in asked] == ["mplug:", "checkpoint.pretrained", "data.path"]
    (only,) = refused("train", "--recipe", "longer", "--set", "data.path=long.jsonl").splitlines()
    assert only.startswith("mplug: checkpoint.pretrained"), "the family, and so its fields, come from the folder"


def test_new_writes_a_file_to_edit_which_keeps_its_comments_and_its_origin(install: Callable[..., None]) -> None:
    install(short=RECIPE)
    told = shown("recipes", "new", "short")
    assert told == "wrote short.yaml; edit it, and train with: mplug train --config short.yaml --set data.path=FILE\n"
    text = Path("short.yaml").read_text()
    assert text.startswith("# A run of two steps.\nrecipe:\n  name: short\n  origin: nova-cookery 1.0\n  summary:")
    assert "  steps: 2    # few\n" in text
    assert "leaves this field to you" in refused("config", "show", "--config", "short.yaml")
    config = yaml.safe_load(shown("config", "show", "--config", "short.yaml", "--set", "data.path=x"))
    assert config["recipe"] == {"name": "short", "origin": "nova-cookery 1.0"}
    assert "'short.yaml' exists already" in refused("recipes", "new", "short")
    shown("recipes", "new", "short", "--output", "other.yaml")
    assert Path("other.yaml").read_text() == text
    assert "there is no folder 'none'" in refused("recipes", "new", "short", "--output", "none/x.yaml")


def test_a_name_that_two_distributions_claim_needs_the_distribution(install: Callable[..., None]) -> None:
    install(lora=RECIPE)
    clash = "'lora' is claimed by mplug-lora 0.1.0 and nova-cookery 1.0; use 'mplug-lora/lora' or 'nova-cookery/lora'"
    for words in (("train", "--recipe", "lora"), ("recipes", "show", "lora"), ("recipes", "new", "lora")):
        assert clash in refused(*words)
    assert "nova-cookery/lora: A short run\n" in shown("recipes", "list")
    config = yaml.safe_load(shown("config", "show", "--recipe", "nova-cookery/lora", "--set", "data.path=x"))
    assert config["recipe"]["origin"] == "nova-cookery 1.0"


def test_an_unknown_name_is_refused_with_the_nearest_one(install: Callable[..., None]) -> None:
    install(short=RECIPE)
    assert "no recipe 'lroa' is installed; did you mean 'lora'?" in refused("train", "--recipe", "lroa")
    assert "no recipe 'nova/lora' is installed" in refused("recipes", "show", "nova/lora")
    Path("own.yaml").write_text(RECIPE)
    assert "; for a file, use --config own.yaml" in refused("train", "--recipe", "own.yaml")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no file short.yaml in 'nova_cookery.recipes'"),
        ("trainer: [", "recipe short:1"),
        ("trainer: {steps: 2}\n", "its section 'recipe' lacks summary, needs and reaches"),
    ],
)
def test_a_broken_recipe_is_named_and_disturbs_no_other(text: str, reason: str, install: Callable[..., None]) -> None:
    install(short=text)
    listed = shown("recipes", "list")
    assert "the recipe 'short' (nova-cookery 1.0) is broken: " in listed
    assert reason in listed
    assert "\nsft: " in f"\n{listed}"
    assert reason in refused("train", "--recipe", "short")


def test_a_recipe_for_another_version_of_mplug_is_refused(install: Callable[..., None]) -> None:
    install(requires=">=9", short=RECIPE)
    assert "requires mplug >=9" in refused("train", "--recipe", "short")


def test_the_schema_has_the_section_of_recipes() -> None:
    schema = json.loads(shown("config", "schema"))
    fields = schema["$defs"]["Recipe"]["properties"]
    assert {"summary", "needs", "reaches", "give"} <= set(fields)


def test_an_unknown_field_of_a_recipes_description_is_refused(install: Callable[..., None]) -> None:
    install(short=RECIPE.replace("  give:", "  gives:"))
    assert "recipe.gives (recipe short:6): unknown field; did you mean 'give'?" in refused("train", "--recipe", "short")


def test_listing_imports_neither_torch_nor_pydantic() -> None:
    script = (
        "import sys\nfrom mplug.cli import main\n"
        "try:\n    main(['recipes', 'list'])\n"
        "except SystemExit:\n    print(sorted({'torch', 'pydantic'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "\nsft: " in done.stdout
