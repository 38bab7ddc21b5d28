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
from command_line import Cli, assert_refused
from distributions import installed as distribution
from packaging.specifiers import SpecifierSet

from mplug.cli import main
from mplug.errors import UsageError
from mplug.model.slots.offers import Site, Unmet
from mplug.registry.entry_points import BrokenPlugin, Registry, _admits
from mplug_estimates import alternatives
from mplug_nn import Attention
from mplug_testing.harness import tiny_config
from mplug_testing.inspection import inspect_here
from mplug_testing.scaffold import describe

Install = Callable[..., Path]

PACKAGES = Path(__file__).parent / "packages"
HOST = f"mplug {version('mplug')}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, install: Install) -> Path:
    """Every package of `packages/`, and a rival of acme-gpt with the same names of plugins."""
    copied = shutil.copytree(PACKAGES, tmp_path_factory.mktemp("sources") / "packages")
    rival = shutil.copytree(copied / "acme-gpt", copied / "zenith-gpt")
    for file in (rival / "pyproject.toml", rival / "src" / "acme_gpt" / "__init__.py"):
        file.write_text(file.read_text().replace("acme", "zenith").replace("2.5.0", "1.3.1"))
    (rival / "src" / "acme_gpt").rename(rival / "src" / "zenith_gpt")
    return install(tmp_path_factory.mktemp("installed"), *sorted(copied.iterdir()))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory, install: Install) -> Path:
    """A folder with another copy of acme-watch: version 1.3.0."""
    copied = shutil.copytree(PACKAGES / "acme-watch", tmp_path_factory.mktemp("sources") / "acme-watch")
    project = copied / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "1.4.0"', 'version = "1.3.0"'))
    return install(tmp_path_factory.mktemp("older"), copied)


def shown(result: subprocess.CompletedProcess[str]) -> str:
    """What a command prints that succeeds and complains of nothing."""
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# Names.


@pytest.mark.parametrize(("distribution", "field"), [("acme-gpt", "acme_width"), ("zenith-gpt", "zenith_width")])
def test_the_distribution_before_the_name_chooses(cli: Cli, installed: Path, distribution: str, field: str) -> None:
    model = yaml.safe_load(shown(cli("config", "show", "--model", f"{distribution}/gpt-mini", path=installed)))["model"]
    assert set(model) == {"name", "frozen", field}
    assert model["name"] == f"{distribution}/gpt-mini"


def test_an_extension_that_is_named_with_its_distribution_gets_what_the_config_says_to_it(
    cli: Cli, installed: Path
) -> None:
    printed = shown(cli("config", "show", "--set", "extensions.acme-watch/watch.file=seen.txt", path=installed))
    assert yaml.safe_load(printed)["extensions"]["acme-watch/watch"]["file"] == "seen.txt"


def test_the_fields_of_a_plugin_are_shown_as_one_writes_them(cli: Cli) -> None:
    lines = cli("plugins", "show", "indexed").stdout.splitlines()
    assert "  path: str | list[str] | dict[str, float], required" in lines
    assert "  samples: 'run' | 'epoch' | int > 0 = 'run'" in lines
    assert "  eod_token: int >= 0 | None = None" in lines
    assert "  fim_rate: float >= 0, <= 1 = 0.0" in lines
    types = {name: kind for name, kind, *_ in inspect_here("parallel", "pp").fields}
    assert types["split"] == "'weights' | 'layers' | 'time' | list[int > 0]"


# Listing, help and completion read metadata only.


def test_listing_shows_what_is_hidden_and_claimed_twice_and_imports_no_plugin(
    cli: Cli, installed: Path, older: Path, tmp_path: Path
) -> None:
    lines = shown(cli("plugins", "list", path=Path(f"{installed}{os.pathsep}{older}"))).splitlines()
    rows = [line.split()[:4] for line in lines]
    assert ["extensions", "rude", "acme-rude", "0.0.1"] in rows
    assert ["models", "fossil", "acme-broken", "0.3.0"] in rows
    assert not [line for line in lines if "acme_rude was imported" in line]
    assert list(tmp_path.iterdir()) == []
    clash = next(line for line in lines if line.startswith("'gpt-mini'"))
    assert all(words in clash for words in ("acme-gpt 2.5.0", "zenith-gpt 1.3.1", "acme-gpt/gpt-mini"))
    (hidden,) = (line for line in lines if "acme-watch 1.3.0" in line)
    assert "another copy of acme-watch hides" in hidden
    assert str(older) in hidden
    assert any("acme-watch" in line and "1.4.0" in line for line in lines)


def test_help_lists_the_commands_of_plugins_without_importing_them(cli: Cli, installed: Path, tmp_path: Path) -> None:
    listed = shown(cli("--help", path=installed)).partition("Commands:")[2]
    commands = {line.split()[0]: line for line in listed.splitlines() if line.strip()}
    assert "acme-tools 0.2.0" in commands["greet"]
    assert {"train", "plugins", "limp"} <= set(commands)
    assert list(tmp_path.iterdir()) == []
    assert shown(cli("greet", "--who", "there", path=installed)) == "hello there\n"


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
        ("mplug ", ["train", "plugins", "greet", "limp"]),
        ("mplug train --model fos", ["fossil"]),
        ("mplug train --model acme-", ["acme-gpt/gpt-mini"]),
        ("mplug train --attention pic", ["picky"]),
        ("mplug plugins show extensions/stum", ["extensions/stumble"]),
    ],
)
def test_the_shell_completes_commands_and_installed_names_without_importing_them(
    installed: Path, tmp_path: Path, words: str, offered: list[str]
) -> None:
    found = complete(words, installed, tmp_path)
    assert set(offered) <= set(found) if words == "mplug " else found == offered
    assert list(tmp_path.iterdir()) == []


def test_pipeline_schedules_are_listed_and_the_precisions_of_the_host_have_a_summary_of_their_own() -> None:
    listed = CliRunner().invoke(main, ["plugins", "list", "--kind", "schedules"], catch_exceptions=False).output
    assert {"1f1b", "zb-v"} <= {line.split()[1] for line in listed.splitlines()}
    native = next(one for one in Registry().entries("precisions") if one.label == "precisions/fp32")
    assert "format of torch" in native.summary


# Plugins that break the contract.

FAULTS = {
    "misspelt-hook": ("'step_finish' is not a hook", "did you mean 'step_finished'?"),
    "unknown-argument": ("'step_finished' has no argument 'recrod'", "did you mean 'record'?"),
    "defaulted-argument": ("'step_finished' has no argument 'recrod'", "did you mean 'record'?"),
    "unmarked-hook": ("'run_started'", "@hookimpl"),
    "no-config": ("no inner class 'Config'",),
    "open-config": ("does not forbid unknown fields",),
    "undescribed-field": ("the field 'mystery' of its Config has no description",),
    "not-a-class": ("'acme_faulty:not_a_class' is not a class",),
    "not-there": ("no attribute 'NotThere'",),
}
SOUND = {
    *("commands/greet", *(f"extensions/{name}" for name in ("dial", "meddler", "ring", "stumble", "watch"))),
    *(f"kernels/{name}" for name in ("delayed", "picky", "product", "verbose")),
    *("parallel/slab", "parallel/squeeze", "precisions/bf16", "precisions/tinto"),
}
BROKEN = {
    "commands/limp",
    *(f"extensions/{name}" for name in ("future", "rude", "usurper", *FAULTS)),
    *("kernels/brash", "kernels/trilobite", "models/fossil", "models/gpt-mini"),
}
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


REFUSED = {
    "config show --model gpt-mini": (
        *("'gpt-mini'", "acme-gpt 2.5.0", "zenith-gpt 1.3.1", "'acme-gpt/gpt-mini'", "'zenith-gpt/gpt-mini'"),
    ),
    "config show --set extensions.acme-gpt/dial={} --set extensions.zenith-gpt/dial={}": (
        "acme-gpt 2.5.0 and zenith-gpt 1.3.1 both provide extensions/dial; use only one of them",
    ),
    **{
        f"config show --set extensions.{name}={{}}": (
            *(f"extensions.{name} (--set)", f"extensions/{name}", "acme-faulty 1.1.0", *words),
        )
        for name, words in FAULTS.items()
    },
    "config show --set extensions.future={}": (
        *("extensions/future", "acme-future 9.0.0", "mplug >=0.9,<1", HOST),
        *("install another release of acme-future", "or of mplug"),
    ),
    "config show --set extensions.rude={}": ("extensions/rude", "acme-rude 0.0.1", "SystemExit"),
    "config show --model fossil": (
        *("model.name (--model)", "models/fossil", "acme-broken 0.3.0", "Traceback (most recent call last)"),
        *("acme_broken/__init__.py", "RuntimeError: the fossil bed is closed"),
    ),
    "limp": ("'limp'", "acme-tools 0.2.0", "the leg is broken"),
    "train TINY --set extensions.usurper={}": ("models/gpt", "extensions/usurper", "'build_model'"),
    "explain TINY --set extensions.ring={}": (
        *("kernels/sdpa", "largest scores", "; verbose can serve it", "kernels.attention=verbose"),
    ),
    "train TINY --data mock --attention picky": (
        *("kernels/picky", "Attention.core", "it needs a chip of the year 2040", "can serve it"),
        "set kernels.attention=sdpa",  # the default kernel, which is fast, comes first
    ),
}
"""Commands -> words of the refusal: broken plugins, rivals, and needs that no kernel meets."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(one, marks=pytest.mark.wide("suites")) if "kernels/" in str(REFUSED[one]) else one
        for one in REFUSED
    ],
)
def test_a_command_is_refused_with_the_distribution_and_the_reason(
    cli: Cli, installed: Path, tiny: list[str], command: str
) -> None:
    words = [word for part in command.split() for word in (tiny if part == "TINY" else [part])]
    result = cli(*words, path=installed)
    assert result.returncode == 2, result.stdout + result.stderr
    assert [word for word in REFUSED[command] if word not in result.stderr] == [], result.stderr
    of_import = ("the leg is broken", "no attribute 'NotThere'", "SystemExit", "Traceback (most recent call last)")
    assert "Traceback" not in result.stderr or any(word in REFUSED[command] for word in of_import)
    assert "step 1/4" not in result.stdout
    if "picky" in command:
        remedy = result.stderr.partition("2040")[2]
        assert all(name in remedy for name in ("reference", "sdpa", "verbose"))
        assert all(name not in remedy for name in ("picky", "trilobite", "brash")), "the last two do not import"


@pytest.mark.parametrize(("kind", "name"), [("kernels", "linear"), ("kernels", "default"), ("parallel", "data")])
def test_a_plugin_that_is_named_as_a_field_of_its_section_is_refused(kind: str, name: str) -> None:
    """`kernels.linear` is the plugin for linear layers: that of the fields of a plugin 'linear' would overwrite it."""
    entry = replace(next(one for one in Registry().entries(kind)), name=name)
    with pytest.raises(BrokenPlugin, match=rf"no plugin of kind '{kind}' can be named '{name}', a field of the host"):
        Registry().load(entry)
    with pytest.raises(UsageError, match=rf"no plugin of kind '{kind}' can be named '{name}', a field of the host"):
        describe(kind, f"acme-{name}")


# Needs and wraps.


def test_a_slot_goes_to_its_claimant_before_the_default_kernel_and_to_a_kernel_that_meets_the_needs(
    cli: Cli, installed: Path, tiny: list[str]
) -> None:
    claims = ("--kernels", "sdpa", "--set", "extensions.meddler={}")
    needs = ("--set", "extensions.ring={}", "--attention", "verbose")
    for options, supplied in ((claims, ["extensions/meddler"]), (needs, ["kernels/verbose", "extensions/ring"])):
        lines = shown(cli("explain", *tiny, *options, path=installed)).splitlines()
        row = next(line.split() for line in lines if "Attention.core" in line)
        assert [word for word in row if word in supplied] == supplied


def test_kernels_that_do_not_answer_in_time_are_named_and_not_taken_for_unable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "TIMEOUT", 0.0)
    with torch.device("meta"):
        module = Attention(8, 2, 2, 4, bias=False, qk_norm=False, theta=None)
    site = Site("blocks.*.attn", "Attention.core", module, "blocks.0.attn")
    told = alternatives.kernels_that_would_do(tiny_config({}), Unmet("kernels/sdpa", site, "it may not"))
    assert "flex" in told.partition(" gave no answer within 0 s")[0]
    assert told.endswith(
        " gave no answer within 0 s, and no other installed kernel can; set kernels.attention=null for the composition "
        "in plain torch"
    )


# Runs: provenance and observers.


def test_plugins_that_a_run_does_not_name_neither_disturb_it_nor_are_imported(
    cli: Cli, installed: Path, tiny: list[str], tmp_path: Path
) -> None:
    printed = shown(cli("train", *tiny, "--data", "mock", "--name", "calm", path=installed))
    assert "acme_rude was imported" not in printed
    assert len(losses(tmp_path / "runs" / "calm")) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_run_says_where_its_plugins_came_from_and_observers_see_it_although_one_fails(
    cli: Cli, installed: Path, tiny: list[str], tmp_path: Path
) -> None:
    options = ("--set", "extensions.watch.file=seen.txt", "--set", "extensions.stumble={}", "--name", "told")
    result = cli("train", *tiny, "--data", "mock", *options, path=installed)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    run = tmp_path / "runs" / "told"
    record = json.loads((run / "record.json").read_text())
    assert record["mplug"] == version("mplug")
    plugins = {plugin["plugin"]: plugin for plugin in record["plugins"]}
    kernels = {"kernels/flash", "kernels/triton", "kernels/sdpa"}
    ours = {"models/gpt", "optimizers/adamw", "data/mock", "precisions/fp32", *kernels}
    ours |= {"extensions/losspicture", "extensions/watchdog"}
    assert set(plugins) == {*ours, "extensions/watch", "extensions/stumble"}
    watch, gpt = plugins["extensions/watch"], plugins["models/gpt"]
    assert (watch["distribution"], watch["version"]) == ("acme-watch", "1.4.0")
    assert (gpt["distribution"], gpt["version"]) == ("mplug-gpt", version("mplug-gpt"))
    code = {"acme_watch": installed / "acme_watch", "mplug_gpt": Path(str(find_spec("mplug_gpt").origin))}  # type: ignore[union-attr]
    for plugin, path in zip((watch, gpt), code.values(), strict=True):
        assert path.is_relative_to(Path(plugin["source"])), "the source holds the code that ran"
    manifest = json.loads((run / "checkpoints" / "step_00000004" / "checkpoint.json").read_text())
    assert manifest["provenance"]["plugins"] == record["plugins"]
    steps = [f"step {n} has loss {loss}" for n, loss in enumerate(losses(run), start=1)]
    assert len(steps) == 4
    seen = (tmp_path / "seen.txt").read_text().splitlines()
    assert seen == ["started before step 1", *steps, "saved step_00000004", "finished"]
    log = (run / "logs" / "rank0.log").read_text()
    assert "observer 'extensions/stumble' failed in step_finished" in log
    assert [step for step in range(1, 5) if f"ValueError: stumbled over step {step}" not in log] == []


def test_an_entry_point_of_a_group_that_there_is_not_is_told(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(tmp_path / "site", "acme-lost", "[mplug.extension]\nlost = acme_lost:Lost\n")
    told = "the entry point 'lost' of acme-lost 1.0 is in the group 'mplug.extension', which mplug "
    meant = "did you mean 'mplug.extensions'?"
    for command in (("plugins", "check", "lost"), ("train", "--set", "extensions.lost.every=1")):
        assert_refused(cli(*command, path=tmp_path / "site"), [told, meant])
    listed = cli("plugins", "list", path=tmp_path / "site")
    assert (listed.returncode, told in listed.stdout) == (0, True)
    monkeypatch.setattr(
        "mplug_testing.plugin_commands.Registry", lambda: Registry(distributions(path=[str(tmp_path / "site")]))
    )
    checked = CliRunner().invoke(main, ["plugins", "check"])
    assert checked.exit_code == 1
    assert checked.output.startswith(f"broken  {told}")
    assert "0 of 1 plugins pass" in checked.output


@pytest.mark.parametrize("version", ["0.1.0", "0.1", "0.2", "1", "0.1.0.dev1", "0.2rc1"])
@pytest.mark.parametrize(
    "requirement", [">=0.1,<0.2", ">=0.1.0, <0.2", "<1", ">=0.1.1", "==0.1.*", "==0.1.0", "~=0.1.0", ""]
)
def test_a_requirement_admits_what_the_packaging_library_says(requirement: str, version: str) -> None:
    assert _admits(requirement, version) == (version in SpecifierSet(requirement, prereleases=True))


def test_a_scan_is_repeated_after_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before = Registry().names("models")
    distribution(tmp_path, "acme-later", "[mplug.models]\nlater = acme_later:Later\n")
    assert sorted([*before, "later"]) == sorted(Registry().names("models"))


def test_a_command_whose_package_is_not_installed_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself is imported without that package."""
    monkeypatch.setitem(sys.modules, "mplug_estimates", None)  # an import fails as if it were not installed
    result = CliRunner().invoke(main, ["explain", "--preset", "nano"])
    assert result.output.endswith(
        "mplug: this command needs the package mplug-estimates, which is not installed: pip install mplug-estimates\n"
    )
    assert result.exit_code == 2
