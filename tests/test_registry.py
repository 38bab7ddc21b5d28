"""What the registry promises, with packages that are really installed: built by their backend, installed by pip."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from mplug.cli import main
from mplug.errors import UsageError
from mplug.model.build import can_be_built
from mplug.model.slots import alternatives
from mplug.model.slots.offers import Site, Unmet
from mplug.registry.entry_points import BrokenPlugin, Registry
from mplug_nn import Attention
from mplug_testing.harness import tiny_config
from mplug_testing.inspection import inspect_here
from mplug_testing.scaffold import describe

Cli = Callable[..., subprocess.CompletedProcess[str]]
Install = Callable[..., Path]

PACKAGES = Path(__file__).parent / "packages"
HOST = f"mplug {version('mplug')}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, install: Install) -> Path:
    """The folder in which every package of `packages/` is installed."""
    copied = shutil.copytree(PACKAGES, tmp_path_factory.mktemp("sources") / "packages")
    return install(tmp_path_factory.mktemp("installed"), *sorted(copied.iterdir()))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory, install: Install) -> Path:
    """A folder with another copy of acme-watch: version 1.3.0."""
    copied = shutil.copytree(PACKAGES / "acme-watch", tmp_path_factory.mktemp("sources") / "acme-watch")
    project = copied / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "1.4.0"', 'version = "1.3.0"'))
    return install(tmp_path_factory.mktemp("older"), copied)


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The user's input is wrong: exit status 2 and a message with these words, without a traceback."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert [word for word in words if word not in result.stderr] == [], result.stderr


def losses(run: Path) -> list[float]:
    """The loss of every step that a run has done."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# Names.


def test_a_name_that_two_distributions_claim_is_an_error_that_names_both(cli: Cli, installed: Path) -> None:
    result = cli("config", "show", "--model", "gpt-mini", path=installed)
    assert_refused(result, "'gpt-mini'", "acme-gpt 2.5.0", "zenith-gpt 1.3.1")
    assert_refused(result, "'acme-gpt/gpt-mini'", "'zenith-gpt/gpt-mini'")


@pytest.mark.parametrize(("distribution", "field"), [("acme-gpt", "acme_width"), ("zenith-gpt", "zenith_width")])
def test_the_distribution_before_the_name_chooses(cli: Cli, installed: Path, distribution: str, field: str) -> None:
    result = cli("config", "show", "--model", f"{distribution}/gpt-mini", path=installed)
    assert result.returncode == 0, result.stderr
    model = yaml.safe_load(result.stdout)["model"]
    assert set(model) == {"name", "frozen", field}
    assert model["name"] == f"{distribution}/gpt-mini"


def test_an_extension_that_is_named_with_its_distribution_gets_what_the_config_says_to_it(
    cli: Cli, installed: Path
) -> None:
    result = cli("config", "show", "--set", "extensions.acme-watch/watch.file=seen.txt", path=installed)
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["extensions"]["acme-watch/watch"]["file"] == "seen.txt"


def test_two_extensions_of_one_name_are_both_bound_or_both_named_in_the_error(cli: Cli, installed: Path) -> None:
    options = [word for who in ("acme", "zenith") for word in ("--set", f"extensions.{who}-gpt/dial={{}}")]
    result = cli("config", "show", *options, path=installed)
    if result.returncode == 0:
        extensions = yaml.safe_load(result.stdout)["extensions"]
        assert [extensions[f"{who}-gpt/dial"] for who in ("acme", "zenith")] == [
            {"acme_dial": 25},
            {"zenith_dial": 131},
        ]
    else:
        assert_refused(result, "dial", "acme-gpt 2.5.0", "zenith-gpt 1.3.1")


def test_the_list_of_plugins_shows_who_claims_a_name_twice(cli: Cli, installed: Path) -> None:
    result = cli("plugins", "list", path=installed)
    assert result.returncode == 0, result.stderr
    clash = next(line for line in result.stdout.splitlines() if line.startswith("'gpt-mini'"))
    assert all(origin in clash for origin in ("acme-gpt 2.5.0", "zenith-gpt 1.3.1"))
    assert all(word in clash for word in ("acme-gpt/gpt-mini", "zenith-gpt/gpt-mini"))


def test_the_fields_of_a_plugin_are_shown_as_one_writes_them(cli: Cli) -> None:
    lines = cli("plugins", "show", "indexed").stdout.splitlines()
    assert "  path: str | list[str] | dict[str, float], required" in lines
    assert "  samples: 'run' | 'epoch' | int > 0 = 'run'" in lines
    assert "  eod_token: int >= 0 | None = None" in lines
    assert "  fim_rate: float >= 0, <= 1 = 0.0" in lines


# Listing, help and completion read metadata only.


def test_listing_never_imports_a_plugin(cli: Cli, installed: Path, tmp_path: Path) -> None:
    result = cli("plugins", "list", path=installed)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["extensions", "rude", "acme-rude", "0.0.1"] in [row[:4] for row in rows]
    assert ["models", "fossil", "acme-broken", "0.3.0"] in [row[:4] for row in rows]
    assert "acme_rude was imported" not in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_another_copy_hides_is_reported(cli: Cli, installed: Path, older: Path) -> None:
    result = cli("plugins", "list", path=Path(f"{installed}{os.pathsep}{older}"))
    assert result.returncode == 0, result.stderr
    hidden = [line for line in result.stdout.splitlines() if "acme-watch 1.3.0" in line]
    assert len(hidden) == 1, "the copy that takes effect is listed, and the hidden one is told once"
    assert "another copy of acme-watch hides" in hidden[0]
    assert str(older) in hidden[0]
    assert "acme-watch 1.4.0" in result.stdout


def test_help_lists_the_commands_of_plugins_without_importing_them(cli: Cli, installed: Path, tmp_path: Path) -> None:
    result = cli("--help", path=installed)
    assert result.returncode == 0, result.stderr
    commands = {line.split()[0]: line for line in result.stdout.partition("Commands:")[2].splitlines() if line.strip()}
    assert "acme-tools 0.2.0" in commands["greet"]
    assert {"train", "plugins", "limp"} <= set(commands)
    assert list(tmp_path.iterdir()) == []


def test_a_plugins_command_runs(cli: Cli, installed: Path) -> None:
    result = cli("greet", "--who", "there", path=installed)
    assert (result.returncode, result.stdout, result.stderr) == (0, "hello there\n", "")


def test_a_plugins_command_that_does_not_import_is_named_with_its_distribution_and_reason(
    cli: Cli, installed: Path
) -> None:
    result = cli("limp", path=installed)
    assert result.returncode == 2
    assert all(words in result.stderr for words in ("'limp'", "acme-tools 0.2.0", "the leg is broken"))


def complete(words: str, path: Path, cwd: Path) -> list[str]:
    """What the shell offers for the last word of a command line."""
    script = Path(sys.executable).with_name("mplug")
    asked = {"_MPLUG_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment = {**os.environ, **asked, "PYTHONPATH": str(path)}
    result = subprocess.run([script], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return [line.partition(",")[2] for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mplug train --model fos", ["fossil"]),
        ("mplug train --model acme-", ["acme-gpt/gpt-mini"]),
        ("mplug train --attention pic", ["picky"]),
        ("mplug plugins show extensions/stum", ["extensions/stumble"]),
    ],
)
def test_the_shell_completes_installed_names_without_importing_plugins(
    installed: Path, tmp_path: Path, words: str, offered: list[str]
) -> None:
    assert complete(words, installed, tmp_path) == offered
    assert list(tmp_path.iterdir()) == []


def test_the_shell_completes_commands_without_importing_them(installed: Path, tmp_path: Path) -> None:
    assert {"train", "plugins", "greet", "limp"} <= set(complete("mplug ", installed, tmp_path))
    assert list(tmp_path.iterdir()) == []


# Plugins that do not import.


def test_plugins_that_a_run_does_not_name_neither_disturb_it_nor_are_imported(
    cli: Cli, installed: Path, tiny: list[str], text_file: Path, tmp_path: Path
) -> None:
    result = cli("train", *tiny, "--set", f"data.path={text_file}", "--name", "calm", path=installed)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "acme_rude was imported" not in result.stdout
    assert len(losses(tmp_path / "runs" / "calm")) == 4
    assert {path.name for path in tmp_path.iterdir()} == {text_file.name, "runs"}


def test_naming_a_plugin_that_does_not_import_is_fatal_with_its_distribution_and_traceback(
    cli: Cli, installed: Path
) -> None:
    result = cli("config", "show", "--model", "fossil", path=installed)
    assert result.returncode == 2
    assert all(words in result.stderr for words in ("model.name (--model)", "models/fossil", "acme-broken 0.3.0"))
    assert "Traceback (most recent call last)" in result.stderr
    assert str(Path("acme_broken", "__init__.py")) in result.stderr
    assert "RuntimeError: the fossil bed is closed" in result.stderr


def test_naming_a_plugin_that_ends_the_process_is_fatal_too(cli: Cli, installed: Path) -> None:
    result = cli("config", "show", "--set", "extensions.rude={}", path=installed)
    assert result.returncode == 2, "a run that did not take place must not look like one that is done"
    assert all(words in result.stderr for words in ("extensions/rude", "acme-rude 0.0.1", "SystemExit"))


FEW = {"acme-tools/greet", "acme-tools/limp", "acme-watch/watch", "acme-broken/fossil", "acme-rude/rude"}
"""Sound and broken ones, one of which ends the process that imports it; a suite finds the fault of 'usurper'."""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.wide("suites"))], ids=["few", "all"])
def test_check_tells_the_sound_from_the_broken_among_all_that_a_folder_has(
    cli: Cli, installed: Path, whole: bool
) -> None:
    entries = Registry(distributions(path=[str(installed)])).entries()
    words = {f"{one.distribution}/{one.name}": f"{one.kind}/{one.name}" for one in entries}
    checked = {word for word in words if whole or word in FEW or words[word] == "extensions/usurper"}
    assert len(checked) > len(FEW)
    result = cli("plugins", "check", *sorted(checked), path=installed)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    ours = [line.split() for line in result.stdout.splitlines() if "(acme-" in line and not line.startswith(" ")]
    found = {state: {label for word, label, *_ in ours if word == state} for state in ("ok", "broken")}
    assert "all implement 'build_model'" in result.stdout, "the report has the faults that the suites find, too"
    assert all(words in result.stdout for words in ("acme-broken 0.3.0", "the fossil bed is closed"))
    of_checked = {words[word] for word in checked}
    assert found["ok"] == SOUND & of_checked
    assert found["broken"] == BROKEN & of_checked


# Plugins that break the contract.

FAULTS = [
    ("misspelt-hook", ("'step_finish' is not a hook", "did you mean 'step_finished'?")),
    ("unknown-argument", ("'step_finished' has no argument 'recrod'", "did you mean 'record'?")),
    ("defaulted-argument", ("'step_finished' has no argument 'recrod'", "did you mean 'record'?")),
    ("unmarked-hook", ("'run_started'", "@hookimpl")),
    ("no-config", ("no inner class 'Config'",)),
    ("open-config", ("does not forbid unknown fields",)),
    ("undescribed-field", ("the field 'mystery' of its Config has no description",)),
    ("not-a-class", ("'acme_faulty:not_a_class' is not a class",)),
    ("not-there", ("no attribute 'NotThere'",)),
]
SOUND = {
    "commands/greet",
    "extensions/dial",
    "extensions/meddler",
    "extensions/ring",
    "extensions/stumble",
    "extensions/watch",
    "kernels/delayed",
    "kernels/picky",
    "kernels/product",
    "kernels/verbose",
    "parallel/slab",
    "parallel/squeeze",
    "precisions/bf16",
    "precisions/tinto",
}
BROKEN = {
    "commands/limp",
    "extensions/future",
    "extensions/rude",
    "extensions/usurper",
    "kernels/brash",
    "kernels/trilobite",
    "models/fossil",
    "models/gpt-mini",
    *(f"extensions/{name}" for name, _ in FAULTS),
}


@pytest.mark.parametrize(("name", "words"), FAULTS, ids=[name for name, _ in FAULTS])
def test_a_plugin_that_breaks_the_contract_is_refused_when_it_is_loaded(
    cli: Cli, installed: Path, name: str, words: tuple[str, ...]
) -> None:
    result = cli("config", "show", "--set", f"extensions.{name}={{}}", path=installed)
    assert result.returncode == 2, result.stdout + result.stderr
    wanted = (f"extensions.{name} (--set)", f"extensions/{name}", "acme-faulty 1.1.0", *words)
    assert [word for word in wanted if word not in result.stderr] == [], result.stderr


@pytest.mark.parametrize(("kind", "name"), [("kernels", "linear"), ("kernels", "default"), ("parallel", "data")])
def test_a_plugin_that_is_named_as_a_field_of_its_section_is_refused(kind: str, name: str) -> None:
    """`kernels.linear` is the plugin for linear layers: that of the fields of a plugin 'linear' would overwrite it."""
    entry = replace(next(one for one in Registry().entries(kind)), name=name)
    with pytest.raises(BrokenPlugin, match=rf"no plugin of kind '{kind}' can be named '{name}', a field of the host"):
        Registry().load(entry)
    with pytest.raises(UsageError, match=rf"no plugin of kind '{kind}' can be named '{name}', a field of the host"):
        describe(kind, f"acme-{name}")


def test_a_plugin_for_another_host_is_refused_with_both_versions_and_the_remedy(cli: Cli, installed: Path) -> None:
    result = cli("config", "show", "--set", "extensions.future={}", path=installed)
    assert_refused(result, "extensions/future", "acme-future 9.0.0", "mplug >=0.9,<1", HOST)
    assert_refused(result, "install another release of acme-future", "or of mplug")


# Rivals.


def test_two_plugins_that_answer_a_hook_for_one_are_refused_naming_both(
    cli: Cli, installed: Path, tiny: list[str]
) -> None:
    result = cli("train", *tiny, "--set", "extensions.usurper={}", path=installed)
    assert_refused(result, "models/gpt", "extensions/usurper", "'build_model'")


def test_a_default_kernel_leaves_a_slot_to_whoever_else_claims_it(cli: Cli, installed: Path, tiny: list[str]) -> None:
    result = cli("explain", *tiny, "--kernels", "sdpa", "--set", "extensions.meddler={}", path=installed)
    core = next(line for line in result.stdout.splitlines() if "Attention.core" in line)
    assert "extensions/meddler" in core


# Unmet needs.


def test_pipeline_schedules_are_listed_and_the_precisions_of_the_host_have_a_summary_of_their_own() -> None:
    shown = CliRunner().invoke(main, ["plugins", "list", "--kind", "schedules"], catch_exceptions=False).output
    assert {"1f1b", "zb-v"} <= {line.split()[1] for line in shown.splitlines()}
    native = next(one for one in Registry().entries("precisions") if one.label == "precisions/fp32")
    assert "format of torch" in native.summary


def test_a_field_that_is_a_list_is_shown_as_one() -> None:
    types = {name: kind for name, kind, *_ in inspect_here("parallel", "pp").fields}
    assert types["split"] == "'weights' | 'layers' | 'time' | list[int > 0]"


def test_a_kernel_that_cannot_serve_is_refused_with_its_reason_and_those_that_would_do(
    cli: Cli, installed: Path, tiny: list[str], text_file: Path
) -> None:
    result = cli("train", *tiny, "--set", f"data.path={text_file}", "--attention", "picky", path=installed)
    assert_refused(result, "kernels/picky", "Attention.core", "it needs a chip of the year 2040", "can serve it")
    remedy = result.stderr.partition("2040")[2]
    assert all(name in remedy for name in ("reference", "sdpa", "verbose"))
    assert "set kernels.attention=sdpa" in remedy, "the default kernel, which is fast, comes first"
    assert all(name not in remedy for name in ("picky", "trilobite", "brash")), "those that do not import cannot do"
    assert "step 1/4" not in result.stdout


def test_what_a_wrap_needs_is_asked_of_every_kernel(cli: Cli, installed: Path, tiny: list[str]) -> None:
    result = cli("explain", *tiny, "--set", "extensions.ring={}", path=installed)
    assert_refused(result, "kernels/sdpa", "largest scores", "; verbose can serve it", "kernels.attention=verbose")


def test_kernels_that_do_not_answer_in_time_are_named_and_not_taken_for_unable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "TIMEOUT", 0.0)
    with torch.device("meta"):
        module = Attention(8, 2, 2, 4, bias=False, qk_norm=False, theta=None)
    site = Site("blocks.*.attn", "Attention.core", module, "blocks.0.attn")
    told = alternatives.kernels_that_would_do(tiny_config({}), Unmet("kernels/sdpa", site, "it may not"), can_be_built)
    assert "flex" in told.partition(" gave no answer within 0 s")[0]
    assert told.endswith(
        " gave no answer within 0 s, and no other installed kernel can; set kernels.attention=null for the composition "
        "in plain torch"
    )


def test_the_kernel_that_would_do_does(cli: Cli, installed: Path, tiny: list[str]) -> None:
    result = cli("explain", *tiny, "--set", "extensions.ring={}", "--attention", "verbose", path=installed)
    assert result.returncode == 0, result.stderr
    row = next(line.split() for line in result.stdout.splitlines() if "Attention.core" in line)
    assert row[-2:] == ["kernels/verbose", "extensions/ring"]


# Provenance and observers.


def test_the_record_and_the_checkpoint_say_where_every_plugin_came_from(
    cli: Cli, installed: Path, tiny: list[str], text_file: Path, tmp_path: Path
) -> None:
    options = ("--set", f"data.path={text_file}", "--set", "extensions.watch={}", "--name", "told")
    assert cli("train", *tiny, *options, path=installed).returncode == 0
    record = json.loads((tmp_path / "runs" / "told" / "record.json").read_text())
    assert record["mplug"] == version("mplug")
    plugins = {plugin["plugin"]: plugin for plugin in record["plugins"]}
    ours = {"models/gpt", "optimizers/adamw", "data/text", "kernels/sdpa", "precisions/fp32"}
    ours |= {"extensions/losspicture", "extensions/watchdog"}
    assert set(plugins) == {*ours, "extensions/watch"}
    watch, gpt = plugins["extensions/watch"], plugins["models/gpt"]
    assert (watch["distribution"], watch["version"]) == ("acme-watch", "1.4.0")
    assert (gpt["distribution"], gpt["version"]) == ("mplug-gpt", version("mplug-gpt"))
    assert (installed / "acme_watch").is_relative_to(Path(watch["source"])), "the source holds the code that ran"
    found = find_spec("mplug_gpt")
    assert found is not None
    assert Path(str(found.origin)).is_relative_to(Path(gpt["source"])), "the source holds the code that ran"
    manifest = tmp_path / "runs" / "told" / "checkpoints" / "step_00000004" / "checkpoint.json"
    assert json.loads(manifest.read_text())["provenance"]["plugins"] == record["plugins"]


def test_an_observer_that_is_named_sees_the_run(
    cli: Cli, installed: Path, tiny: list[str], text_file: Path, tmp_path: Path
) -> None:
    options = ("--set", f"data.path={text_file}", "--set", "extensions.watch.file=seen.txt", "--name", "watched")
    result = cli("train", *tiny, *options, path=installed)
    assert result.returncode == 0, result.stderr
    steps = [f"step {n} has loss {loss}" for n, loss in enumerate(losses(tmp_path / "runs" / "watched"), start=1)]
    assert len(steps) == 4
    seen = (tmp_path / "seen.txt").read_text().splitlines()
    assert seen == ["started before step 1", *steps, "saved step_00000004", "finished"]


def test_an_observer_that_fails_is_logged_and_does_not_end_the_run(
    cli: Cli, installed: Path, tiny: list[str], text_file: Path, tmp_path: Path
) -> None:
    options = ("--set", f"data.path={text_file}", "--set", "extensions.stumble={}", "--name", "stumbled")
    result = cli("train", *tiny, *options, path=installed)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    run = tmp_path / "runs" / "stumbled"
    assert len(losses(run)) == 4
    log = (run / "logs" / "rank0.log").read_text()
    assert "observer 'extensions/stumble' failed in step_finished" in log
    assert [step for step in range(1, 5) if f"ValueError: stumbled over step {step}" not in log] == []


def test_an_entry_point_of_a_group_that_there_is_not_is_told(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "site" / "acme_lost-1.0.dist-info"
    information.mkdir(parents=True)
    information.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: acme-lost\nVersion: 1.0\n")
    information.joinpath("entry_points.txt").write_text("[mplug.extension]\nlost = acme_lost:Lost\n")
    told = "the entry point 'lost' of acme-lost 1.0 is in the group 'mplug.extension', which mplug "
    meant = "did you mean 'mplug.extensions'?"
    assert_refused(cli("plugins", "check", "lost", path=tmp_path / "site"), told, meant)
    assert_refused(cli("train", "--set", "extensions.lost.every=1", path=tmp_path / "site"), told, meant)
    listed = cli("plugins", "list", path=tmp_path / "site")
    assert (listed.returncode, told in listed.stdout) == (0, True)
    monkeypatch.setattr(
        "mplug_testing.plugin_commands.Registry", lambda: Registry(distributions(path=[str(tmp_path / "site")]))
    )
    checked = CliRunner().invoke(main, ["plugins", "check"])
    assert checked.exit_code == 1
    assert checked.output.startswith(f"broken  {told}")
    assert "0 of 1 plugins pass" in checked.output
