"""Broken configs, checkpoints, files of runs and indices: each is used, or refused in one sentence. Nothing else."""

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import yaml
from fuzzing import config_text, damage_checkpoint, damaged, index_of, junk, mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mplug import UsageError
from mplug.cli import main
from mplug.config.binding import RunConfig
from mplug.config.defaults import default_settings, saved_settings
from mplug.config.sources import read_assignments, read_yaml
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.metrics_file import read_lines
from mplug.run.prepare import prepare
from mplug_estimates.size_limits import refuse_beyond_memory
from mplug_saving.manifest import checksum

SECONDS = 60
"""A case that takes longer hangs."""
FUZZ = pytest.mark.wide("fuzz")


def fuzz(quick: int, wide: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of so many cases, in the quick tests and in the wide set.

    A case gets a source of randomness, and fixtures. A UsageError is fine, any other error and a hang are not.
    """

    def of(case: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("cases", [quick, pytest.param(wide, marks=FUZZ)])
        def test(cases: int, request: pytest.FixtureRequest) -> None:
            fixtures = {name: request.getfixturevalue(name) for name in [*signature(case).parameters][1:]}

            @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(st.integers(0, 2**63))
            def once(seed: int) -> None:
                with limited(SECONDS), contextlib.suppress(UsageError):
                    case(Random(seed), **fixtures)

            once()

        test.__doc__ = case.__doc__
        return test

    return of


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """A TimeoutError after so many seconds."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"a case takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_process(*arguments: str) -> None:
    """Call the command line in this process; it must exit with 0 or 2, and say why where it is 2."""
    errors = io.StringIO()
    status: Any = 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            main.main([*arguments], prog_name="mplug")
        except SystemExit as end:
            status = end.code or 0
    assert status in (0, 2), (status, errors.getvalue())
    assert status == 0 or errors.getvalue().strip()
    assert "Traceback" not in errors.getvalue()


@cache
def registry() -> Registry:
    return Registry()


@cache
def bases() -> list[tuple[Any, dict[str, Any]]]:
    """Default runs of several plugins: their settings, and every field that they have."""
    found = []
    for words in (["data.name=mock"], ["model.name=mixtral", "model.preset=null", "data.name=mock"],
                  ["data.name=indexed", "data.path=x", "optimizer.name=muon"], ["data.name=packed", "data.path=x"],
                  ["data.name=text", "optimizer.name=sgd"]):  # fmt: skip
        config = resolve(registry(), default_settings(), read_assignments(words))
        tree = config.resolved()
        tree["memory"] = {"recompute": {"mode": "none", "every": 1}}
        found.append((read_yaml(yaml.safe_dump(tree), "run"), tree))
    return found


def settled(base: Any, overrides: Any) -> RunConfig:
    """The config as every command settles it, and as `config show` prints it."""
    config = resolve(registry(), base, overrides)
    prepare(config)
    yaml.safe_dump(config.resolved())
    config.sources()
    return config


# Configs.


@fuzz(20, 3000)
def test_a_config_file_is_used_or_refused(random: Random) -> None:
    base, tree = random.choice(bases())
    settled(base, read_yaml(config_text(random, tree), "run.yaml"))


@fuzz(30, 1500)
def test_assignments_are_used_or_refused(random: Random) -> None:
    base, tree = random.choice(bases())
    section = random.choice([*tree])
    field = random.choice([*(tree[section] or {"x": 0}), "x", "a.b", "." * 2000])
    value = json.dumps(junk(random)) if random.random() < 0.5 else str(junk(random))
    settled(base, read_assignments([f"{section}.{field}={value}"]))


@fuzz(6, 500)
def test_a_model_of_any_size_is_built_or_refused(random: Random) -> None:
    """`num_layers` up to its bound would take minutes to build, which is slow and no defect."""
    base, tree = random.choice(bases()[:2])
    numbers = [name for name, value in tree["model"].items() if isinstance(value, int) and name != "num_layers"]
    words = ["model.num_layers=2", "trainer.device=cpu"]
    sizes = [1, 2, 4, 64, 127, 2**20, 2**31, 2**40, 10**12, 2**62, 2**63 - 1]
    words += [f"model.{name}={random.choice(sizes)}" for name in random.sample(numbers, random.randrange(1, 4))]
    words += [f"trainer.{name}={random.choice(sizes)}" for name in ("seq_length", "global_batch_size")]
    run = prepare(resolve(registry(), base, read_assignments(words)))
    refuse_beyond_memory(run, build_model(run), None)


# Runs: their checkpoints and other files.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text.txt").write_text("".join(f"{a} times {b} is {a * b}.\n" for a in range(40) for b in range(26)))
    fields = ["model.preset=null", "model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2",
              "model.vocab_size=256", "trainer.seq_length=16", "trainer.micro_batch_size=2", "trainer.steps=4",
              "trainer.global_batch_size=4", "trainer.device=cpu", "trainer.eval_every=0", "checkpoint.every=2",
              f"data.path={folder / 'text.txt'}"]  # fmt: skip
    with contextlib.chdir(folder):
        in_process("train", "--name", "done", *(word for field in fields for word in ("--set", field)))
    return folder


def copied(saved: Path) -> Path:
    run = saved / "runs" / "case"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(saved / "runs" / "done", run)
    return run


@fuzz(10, 2500)
def test_a_checkpoint_is_used_or_refused(random: Random, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case is listed, shown and verified; one of ten is sampled from, one of fifty resumed."""
    monkeypatch.chdir(saved)
    run = copied(saved)
    damage_checkpoint(random, run / "checkpoints" / "step_00000004", checksum)
    in_process("checkpoint", "list", "--name", "case")
    in_process("checkpoint", "show", "--name", "case", "--tensors")
    in_process("checkpoint", "verify", "--name", "case")
    if random.random() < 0.1:
        in_process("generate", "--name", "case", "--tokens", "1", "--device", "cpu")
    if random.random() < 0.02:
        in_process("train", "--resume", "--name", "case", "--set", "trainer.steps=5")


@fuzz(8, 1000)
def test_the_config_and_the_metrics_of_a_run_are_used_or_refused(random: Random, saved: Path) -> None:
    run = copied(saved)
    config, metrics = run / "config.yaml", run / "metrics.jsonl"
    if random.random() < 0.5:
        tree = mutated(random, yaml.safe_load(config.read_text()), random.randrange(1, 4))
        config.write_text(yaml.safe_dump(tree))
    else:
        config.write_bytes(damaged(random, config.read_bytes()))
    with contextlib.suppress(UsageError):
        settled(saved_settings(run), {})
    lines = [json.dumps(mutated(random, json.loads(line), 1)) for line in metrics.read_text().splitlines()]
    metrics.write_bytes(damaged(random, "\n".join(lines).encode()))
    read_lines(metrics)


# Data.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 30 sequences, 20 documents."""
    from mplug_indexed.files import Writer

    prefix = tmp_path_factory.mktemp("indexed") / "set"
    with Writer(prefix, np.uint16) as writer:
        for number in range(20):
            lengths = [number % 7 + 1, 3] if number % 2 else [number % 5 + 1]
            writer.add_document(np.arange(sum(lengths)) % 250, lengths)
    return prefix


@fuzz(80, 1500)
def test_an_index_is_read_within_its_file_or_refused(random: Random, pair: Path) -> None:
    from mplug_indexed.files import Reader, bin_path, idx_path

    whole, tokens = idx_path(pair).read_bytes(), bin_path(pair).read_bytes()
    prefix = pair.with_name("case")
    idx_path(prefix).write_bytes(index_of(random, whole))
    bin_path(prefix).write_bytes(tokens if random.random() < 0.8 else damaged(random, tokens))
    reader = Reader(prefix)
    reader.verify()
    found = np.concatenate([reader.read(number) for number in range(len(reader))] or [np.empty(0)])
    assert len(found) == int(reader.lengths.sum()) <= len(reader.tokens)


# Processes.


@pytest.mark.wide("fuzz")
def test_fifty_broken_inputs_through_real_processes(saved: Path, tmp_path: Path) -> None:
    """The command `mplug` itself: 30 configs, 10 checkpoints, 10 edited runs; each exits 0 or 2 within its time."""
    random = Random(19)
    for number in range(50):
        arguments = ["config", "show", "--config", str(tmp_path / "run.yaml")]
        if number < 30:
            (tmp_path / "run.yaml").write_text(config_text(random, random.choice(bases())[1]))
        else:
            run = copied(saved)
            if number < 40:
                damage_checkpoint(random, run / "checkpoints" / "step_00000004", checksum)
            else:
                (run / "config.yaml").write_bytes(damaged(random, (run / "config.yaml").read_bytes()))
            commands = ("checkpoint verify", "generate --tokens 1", "train --resume --set trainer.steps=5")
            arguments = [*random.choice(commands).split(), "--name", "case"]
        command = [sys.executable, "-m", "mplug", *arguments]
        ended = subprocess.run(command, cwd=saved, capture_output=True, text=True, timeout=2 * SECONDS)
        assert ended.returncode in (0, 2), (number, arguments, ended.stderr)
        assert "Traceback" not in ended.stderr, (number, arguments, ended.stderr)
