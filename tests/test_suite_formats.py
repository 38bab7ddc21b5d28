"""A third party's format: the commands find it by its entry points; `test_suites.py` has the faults of its suite."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli
from distributions import installed

from mplug import UsageError
from mplug_testing import FormatSuite


def test_the_suite_refuses_a_format_that_loses_a_setting(plant: Callable[..., None]) -> None:
    returned = "return PublicSettings(settings)"
    plant("nova-folio", returned, returned.replace("settings)", '{**settings, "num_kv_heads": None})'))
    suite = type("Folio", (FormatSuite,), {"plugin": "folio"})()
    with pytest.raises(UsageError, match=r"settings contradict|does not fit the model"):
        suite.test_a_run_that_begins_with_an_export_has_the_exported_weights()


@pytest.fixture
def exported(plant: Callable[..., None], tiny: list[str], tmp_path: Path, cli_here: Cli) -> Path:
    plant("nova-folio")
    trained = cli_here("train", "--name", "one", *tiny, "--data", "mock")
    assert trained.returncode == 0, trained.stderr
    done = cli_here("checkpoint", "export", "--to", "folio", "pages", "--name", "one")
    assert done.returncode == 0, done.stderr
    return tmp_path / "pages"


def test_a_run_begins_with_a_folder_of_the_format_and_so_does_its_import(
    exported: Path, tiny: list[str], cli_here: Cli
) -> None:
    """The section 'model' comes from the folder; under two ranks each reads its boxes."""
    own = [word for field in tiny[1::2] if not field.startswith("model.") for word in ("--set", field)]
    options = [*own, "--data", "mock", "--set", "trainer.steps=1"]
    shown = cli_here("explain", "--pretrained", str(exported), *options)
    assert shown.returncode == 0, shown.stderr
    assert "'mplug checkpoint export --to folio' writes folio.json and an array for each parameter" in shown.stdout
    for name, layout in (("two", ""), ("three", "tp2")):
        words = ["--parallel", layout] if layout else []
        begun = cli_here("train", "--name", name, "--pretrained", str(exported), *options, *words)
        assert begun.returncode == 0, begun.stderr
        assert f"with the weights of '{exported}'" in begun.stdout
    imported = cli_here("checkpoint", "import", "--from", "folio", str(exported), "--name", "four", *tiny)
    assert imported.returncode == 0, imported.stderr


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("--set", "model.hidden_size=64"), "model.hidden_size (--set): 64, but the weights need 32"),
        (("--model", "llama"), "describes a model of models/gpt; use --model gpt"),
    ],
)
def test_settings_that_contradict_the_folder_are_refused(
    exported: Path, cli_here: Cli, change: tuple[str, ...], sentence: str
) -> None:
    refused = cli_here("train", "--pretrained", str(exported), *change)
    assert refused.returncode == 2
    assert sentence in refused.stderr


def test_tensors_of_another_model_are_refused_and_except_leaves_them_out(
    exported: Path, tiny: list[str], cli_here: Cli
) -> None:
    page = json.loads((exported / "folio.json").read_text())
    page["settings"]["num_layers"] = 1
    (exported / "folio.json").write_text(json.dumps(page))
    words = ["train", "--pretrained", str(exported), "--data", "mock", "--set", "trainer.device=cpu"]
    words += ["--set", "trainer.steps=1", "--set", "trainer.seq_length=32", "--set", "trainer.eval_every=0"]
    refused = cli_here(*words)
    assert refused.returncode == 2
    assert "the model does not use 'blocks.1.attn." in refused.stderr
    assert "name them in checkpoint.pretrained.except" in refused.stderr
    taken = cli_here(*words, "--set", "checkpoint.pretrained.except=[blocks.1]")
    assert taken.returncode == 0, taken.stderr


def test_two_formats_that_recognise_a_folder_are_named(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli_here: Cli
) -> None:
    points = "[mplug.formats]\nrival = acme_rival:Rival\n[mplug.format_files]\nfolio.json = rival\n"
    code = "from mplug_pretrained import Format\nclass Rival(Format): pass\n"
    monkeypatch.syspath_prepend(installed(tmp_path / "rivals", "acme-rival", points, code))
    refused = cli_here("train", "--pretrained", str(exported))
    assert refused.returncode == 2
    assert "is recognised by formats/rival (acme-rival 1.0) and formats/folio (nova-folio 1.0.0)" in refused.stderr
