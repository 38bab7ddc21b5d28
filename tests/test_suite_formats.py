"""A third party's format: its suite passes and catches faults, and the commands find it by its entry points."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mplug_testing import Fault, FormatSuite

Cli = Callable[..., CompletedProcess[str]]


class Folio(FormatSuite):
    plugin = "folio"


@pytest.mark.wide("suites")
def test_a_sound_format_passes(own_tests: Callable[..., str]) -> None:
    assert "failed" not in own_tests("nova-folio")


FAULTS = {
    "it is no format": (
        "class Folio(Format):",
        "class Folio:\n    class Config(Format.Config):\n        pass\n",
        Folio.test_it_is_a_format,
        "is no subclass of mplug.Format",
    ),
    "a folder without a page is a bug": (
        "except (OSError, ValueError, RecursionError) as error:",
        "except (ValueError, RecursionError) as error:",
        Folio.test_an_empty_folder_is_refused_in_a_sentence,
        "of an empty folder raises FileNotFoundError",
    ),
    "boxes begin elsewhere": (
        "slice(low, low + length)",
        "slice(0, length)",
        Folio.test_boxes_are_parts_of_their_tensors,
        "is no part of the whole tensor",
    ),
    "values are rounded": (
        'values(name, "float32").numpy()',
        'values(name, "bfloat16").float().numpy()',
        Folio.test_a_run_that_begins_with_an_export_has_the_exported_weights,
        "has other values in the run than in the exported checkpoint",
    ),
    "a setting is lost": (
        "return PublicSettings(settings)",
        'return PublicSettings({**settings, "num_kv_heads": None})',
        Folio.test_a_run_that_begins_with_an_export_has_the_exported_weights,
        "settings contradict|does not fit the model",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches(fault: str, plant: Callable[..., None]) -> None:
    right, wrong, test, words = FAULTS[fault]
    plant("nova-folio", right, wrong)
    with pytest.raises(Exception, match=words) as raised:
        test(Folio())
    assert isinstance(raised.value, Fault) or "UsageError" in type(raised.value).__name__


@pytest.fixture
def exported(plant: Callable[..., None], tiny: list[str], tmp_path: Path, cli_here: Cli) -> Path:
    """A folio of a run of two layers."""
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
    own = [word for word in tiny if not word.startswith("model.")]
    own = [word for number, word in enumerate(own) if word != "--set" or own[number + 1 : number + 2] != ["--set"]]
    options = [*(own[:-1] if own[-1] == "--set" else own), "--data", "mock", "--set", "trainer.steps=1"]
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
    site = tmp_path / "rivals"
    described = site / "acme_rival-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-rival\nVersion: 1.0\n")
    points = "[mplug.formats]\nrival = acme_rival:Rival\n[mplug.format_files]\nfolio.json = rival\n"
    (described / "entry_points.txt").write_text(points)
    (site / "acme_rival.py").write_text("from mplug import Format\nclass Rival(Format): pass\n")
    monkeypatch.syspath_prepend(site)
    refused = cli_here("train", "--pretrained", str(exported))
    assert refused.returncode == 2
    assert "is recognised by formats/rival (acme-rival 1.0) and formats/folio (nova-folio 1.0.0)" in refused.stderr
