"""Fixtures and the option `--wide` for the tests of the host and of all bundled plugins.

`pytest` runs the quick tests. `pytest --wide SET` runs only the tests that carry the mark `wide("SET")`.

Two files are tested at a time, so each process computes with one thread: more threads than cores only wait. Many
processes import the same modules, so Python keeps what it has compiled, whatever the environment says. No example of
hypothesis fails because it is slow: its duration depends on the processor and on other work.
"""

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import cli, cli_here  # noqa: F401 (fixtures of all tests)
from hypothesis import HealthCheck, settings
from torchless import forking_scripts
from warm import forking_modules

from mplug_testing.workers import PRELOAD

gc.disable()  # until all tests are collected: what their modules make, stays
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
os.environ.setdefault("MPLUG_CHECK_EXCHANGES", "1")  # ranks compare what they exchange as flat buffers
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
settings.register_profile(
    "same everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same everywhere")  # --hypothesis-profile default draws new examples

HEAVY = {"datasets", "energon", "flash", "fp8", "huggingface", "mlflow", "quack", "sentencepiece", "tiktoken", "triton"}
"""Plugins whose libraries take long to import."""


def bundled_modules() -> list[str]:
    """Every module of the host, of the distributions beside it and of the plugins, but the heavy ones.

    Workers of `mplug_testing` and the processes of the fixture `cli` start with them imported.
    """
    root = Path(__file__).parent
    packages = sorted([*root.glob("*/src/*"), *root.glob("plugins/*/*/src/*"), root / "mplug"])
    files = [file for one in packages if one.parent.parent.name not in HEAVY for file in one.rglob("*.py")]
    names = (".".join(file.relative_to(_source_of(file)).with_suffix("").parts) for file in files)
    return sorted({name.removesuffix(".__init__") for name in names if not name.endswith("__main__")})


def _source_of(file: Path) -> Path:
    return next(folder for folder in file.parents if folder.name == "src" or (folder / "conftest.py").exists())


PRELOAD.extend([*bundled_modules(), "rich.progress", "safetensors.torch"])

WIDE = {
    "compile": "longer tests of compiled units, the yardstick of `mplug bench`, and a benchmark of mixers",
    "configs": "1,000 generated config.json files of each architecture, computed beside the transformers library",
    "data": "the whole suites of data/datasets (mapped and streamed) and of conversations in data/energon; losses of "
    "data/datasets under layouts; every loader that reads from the addresses of a store",
    "disks": "the cases of `pairs` in which a rank dies, continued from the local checkpoints on one of two machines",
    "experts": "every way of routing and balancing experts, under several layouts",
    "families": "more families: greedy text, logits and round trips, beside the transformers library; replayed steps "
    "and layouts of each",
    "fuzz": "broken configs, checkpoints, files of runs and indices: 10,000 in one process, 50 in processes; "
    "every character, as more tokenizers cut it",
    "kills": "more points at which workers are killed, damaged and crafted checkpoints; restarts; a full "
    "disk and a taken port of several processes",
    "layouts": "more layouts of what the set `pairs` does not combine, and all shapes of the model gpt",
    "loggers": "the whole suites of the extensions wandb, mlflow and profile, and more of those of watchdog and "
    "losspicture",
    "machines": "torchrun, mpirun, local checkpoints on two machines (network namespaces); no common folder",
    "pairs": "every pair of values of all features, and the product of some, compared with one process in fp64",
    "mutants": "every recorded mutant of what ranks exchange, made from the code, with the test that kills it",
    "precision": "more layouts and methods in bf16, fp16 and FP8",
    "relayout": "live changes of the layout in a tenth of the cases of `pairs`, in which every value occurs; kills at "
    "more moments",
    "reshard": "resumes of optimizers, sharded checkpoints, buffers of slots and DeepSpeed under other layouts",
    "scaffold": "every kind of package that `plugins new` writes: installed, tested and used",
    "session": "the first training run of README.md with all its steps; a toy run of every recipe; all distributions "
    "built, mplug-all installed from them; the host's wheel with others; the packages of several strangers beside all "
    "and with the host alone; the commands of every page",
    "site": "the documentation site without and with the API, its pages in a browser, the controls of a report, and a "
    "report of trained runs there",
    "suites": "every planted mistake that a suite of mplug_testing must catch, every field of every Config, all kernel "
    "cases for kernels/flex, and `plugins check` of every package in tests/packages",
}
"""The sets of tests that `pytest` runs only on request, and what each set holds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--wide`."""
    sets = "\n".join(f"{name}: {content}" for name, content in WIDE.items())
    parser.getgroup("mplug").addoption(
        "--wide",
        action="append",
        choices=[*WIDE, "all"],
        default=[],
        metavar="SET",
        help=f"run only the wide tests of this set instead of the quick tests; may be repeated. Sets:\n{sets}\nall",
    )


TRYING_FIELDS = "test_every_field_of_its_config_has_an_effect"
INHERITED = {
    TRYING_FIELDS: ("suites", {"bytes", "gpt", "labelled", "lion", "mock", "schedulefree", "sgd", "text", "tiktoken"}),
    "test_neither_importing_nor_configuring_it_imports_torch": (
        "suites",
        {"adamw", "data", "dpo", "fsdp", "gpt", "lora", "mock", "plan", "recompute", "tensorboard"},
    ),
    "test_replayed_steps_are_steps": ("families", {"gpt"}),
    "test_a_run_in_fp32_rounds_as_one_process_does": ("precision", set()),
    "test_neither_micro_batches_nor_a_compiler_change_a_result": ("compile", set()),
    "test_frozen_parameters_stay_and_the_others_train_as_in_one_process": ("layouts", {"pp"}),
    "test_what_its_modules_mix_is_declared": ("families", {"gpt", "granite", "t5"}),
    "test_its_gradients_are_differences_of_its_loss": ("families", {"gpt", "gpt-oss", "granite", "kimi-linear", "t5"}),
    "test_what_is_frozen_changes_no_other_gradient": ("families", {"deepseek", "gpt", "granite", "t5"}),
    "test_a_seed_gives_one_model_and_one_loss": ("families", {"bert", "deepseek", "gpt", "granite", "t5"}),
    "test_gradients_of_two_micro_batches_add_up_in_the_sinks": (
        "families",
        {"bert", "deepseek", "gpt", "granite", "t5"},
    ),
    "test_a_degree_of_one_changes_nothing": ("layouts", {"dp", "fsdp"}),
    "test_an_odd_degree_is_refused_or_gives_the_run_of_one_process": (
        "layouts",
        {"cp", "dp", "ep", "fsdp", "tp", "zero"},
    ),
    "test_it_leaves_nothing_open_or_running": ("loggers", {"tensorboard"}),
    "test_it_survives_a_resume": ("loggers", set()),
    "test_it_works_on_every_rank": ("loggers", set()),
    "test_its_files_tell_of_the_whole_run_after_a_resume": ("loggers", {"tensorboard"}),
    "test_it_writes_the_files_that_it_says_and_no_other": ("loggers", {"losspicture"}),
    "test_its_hooks_are_called_in_the_order_of_a_run": ("loggers", {"tensorboard"}),
    "test_a_run_with_it_under_a_layout_is_the_run_without_it": ("layouts", set()),
    "test_a_run_under_a_layout_is_that_of_one_process": ("layouts", set()),
    "test_a_run_with_it_is_the_run_without_it": ("loggers", {"recompute", "tensorboard", "watchdog"}),
    "test_micro_batches_may_differ_in_size": ("layouts", {"pp", "zero"}),
    "test_wrong_arguments_are_refused_in_a_sentence": (
        "suites",
        {"data", "generate", "plan"},
    ),
    "test_a_layout_computes_what_one_process_does": ("layouts", {"grpo"}),
    "test_a_run_trains_on_it_and_resumes": ("data", {"indexed", "mock"}),
    "test_a_loader_leaves_nothing_running": ("data", {"energon", "text"}),
    "test_a_seed_gives_one_order_in_every_process": ("data", {"energon", "indexed", "mock", "rollouts"}),
}
"""Tests of suites that repeat a run of the same layout or blocks: the wide set, and the plugins that stay quick."""
CASES = {
    "test_it_resumes_exactly": ("data", {"train-(4, 2)", "validation-(1, 4)"}),
    "test_a_run_finds_no_fault_in_its_micro_batches": ("data", {"train-2"}),
    "test_ranks_together_read_what_one_rank_reads": ("data", {"train-4"}),
    "test_a_run_of_another_length_has_the_same_order_or_is_refused_the_state": ("data", {"train"}),
    "test_samples_have_one_order_whatever_the_portions_and_micro_batches": ("data", {"train"}),
    "test_the_model_keeps_its_parameters": ("layouts", {"experts"}),
    "test_a_layout_is_data": ("layouts", {"cp2", "dp2", "ep2", "ep2etp2", "fsdp2", "pp2", "tp2", "zero2"}),
    "test_a_layout_computes_what_one_process_does": ("layouts", {"cp2"}),
    "test_a_layout_gives_the_run_of_one_process": (
        "layouts",
        {"cp2", "cp2dp2", "dp2", "ep2", "ep2etp2", "fsdp2", "pp2", "tp2", "zero2"},
    ),
    "test_a_layout_gives_the_weights_of_one_process": ("layouts", {"zero2"}),
    "test_a_variant_gives_the_run_of_one_process": (
        "layouts",
        {"everything", "everything-whole-stream-overlap", "offloaded", "ulysses"},
    ),
    "test_a_run_with_it_is_the_run_without_it": ("precision", {"tiny-fp32"}),
    "test_it_leaves_nothing_open_or_running": ("loggers", {"failed"}),
}
"""Tests of suites with cases that differ little: the wide set, and the cases that stay quick."""
OF_A_DESCRIPTION = {
    "test_documents_of_a_packed_sample_are_apart",
    "test_its_external_names_cover_it",
    "test_its_flops_are_those_of_its_matrix_products",
    "test_its_loss_is_a_sum_with_a_count",
    "test_its_plan_covers_exactly_its_parameters",
    "test_its_presets_are_valid",
    "test_it_computes_what_its_reference_computes",
    "test_it_is_installed_and_says_which_mplug_it_speaks",
    "test_it_keeps_the_contract",
    "test_its_config_survives_being_saved_and_read_again",
    "test_sampling_with_a_cache_is_exact",
    "test_the_plan_names_the_axes_of_all_that_flows",
}
DESCRIBED = {"gemma", "llama", "mixtral", "nemotron", "qwen", "qwen-vl"}
"""Families that describe the shared decoder: quick are the tests of what they describe, not those of its blocks."""
OF_VARIANT = {
    "test_a_layout_computes_what_one_process_does",
    "test_a_layout_gives_the_run_of_one_process",
    "test_a_layout_gives_the_weights_of_one_process",
    "test_a_later_token_changes_no_earlier_logit",
    "test_a_micro_batch_is_what_the_contract_says",
    "test_a_run_with_it_is_the_run_without_it",
    "test_a_variant_gives_the_run_of_one_process",
    "test_attention_is_causal",
    "test_documents_of_a_packed_sample_are_apart",
    "test_every_sample_comes_once_an_epoch",
    "test_it_computes_what_its_reference_computes",
    "test_it_resumes_exactly",
    "test_its_buffers_are_what_it_declares",
    "test_its_external_names_cover_it",
    "test_its_flops_are_those_of_its_matrix_products",
    "test_its_plan_covers_exactly_its_parameters",
    "test_less_stays_on_the_device",
    "test_one_pass_writes_weights",
    "test_replayed_steps_are_steps",
    "test_sampling_with_a_cache_is_exact",
    "test_several_optimizers_update_their_pieces_as_one_does",
    "test_the_plan_names_the_axes_of_all_that_flows",
    "test_updates_are_those_of_the_reference",
    "test_values_and_gradients_are_those_of_plain_torch",
    "test_what_a_kernel_draws_is_drawn_again",
}
"""Tests of suites about what differs between the variants of a plugin. Others are quick for its first suite only."""
FIRST: dict[str, type] = {}
"""The first suite of each plugin, in the order of the collection."""


def wide_by_rule(item: pytest.Item) -> set[str]:
    """The wide set of a test that a bundled plugin inherits from a suite, if it is not quick there.

    INHERITED and CASES list what suites repeat, OF_VARIANT what more than the first suite of a plugin tries quickly.
    """
    suite = getattr(item, "cls", None)
    plugin = getattr(suite, "plugin", "").rpartition("/")[2]
    name = getattr(item, "originalname", item.name)
    inherited = getattr(getattr(suite, name, None), "__module__", "").startswith("mplug_testing")
    if not plugin or not inherited or item.get_closest_marker("gpu"):
        return set()
    if name in INHERITED and plugin not in INHERITED[name][1]:
        return {INHERITED[name][0]}
    if name in CASES and hasattr(item, "callspec") and item.callspec.id not in CASES[name][1]:
        return {CASES[name][0]}
    if suite.kind == "models" and plugin in DESCRIBED and name not in OF_A_DESCRIPTION:  # type: ignore[union-attr]
        return {"families"}
    is_variant = FIRST.setdefault(f"{suite.kind}/{plugin}", suite) is not suite  # type: ignore[union-attr]
    return {"suites"} if is_variant and name not in OF_VARIANT else set()


def wide_sets(item: pytest.Item) -> set[str]:
    """The sets that the marks of a test name.

    `wide("layouts", quick=["tp2"])` leaves the cases with these ids among the quick tests. On a class,
    `tests=["test_a"]` selects the tests that the mark is for, and `quick` may name tests too.
    """
    name, case = getattr(item, "originalname", item.name), getattr(getattr(item, "callspec", None), "id", "")
    found: set[str] = set()
    for mark in item.iter_markers("wide"):
        tests, quick = mark.kwargs.get("tests", [name]), mark.kwargs.get("quick", [])
        named = {one for one in (*tests, *quick) if one.startswith("test_")}
        if unknown := [one for one in named - {name} if not hasattr(getattr(item, "cls", None), one)]:
            raise pytest.UsageError(f"{item.nodeid}: the mark wide names tests that its class lacks: {unknown}")
        if name in tests and not {name, case} & set(quick):
            found |= set(mark.args)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the wide sets that the command line names, or the tests of no wide set."""
    requested: set[str] = set(config.getoption("--wide"))
    if "all" in requested:
        requested = set(WIDE)
    selected, deselected = [], []
    for item in items:
        wide = wide_sets(item) or wide_by_rule(item)
        if unknown := wide - set(WIDE):
            raise pytest.UsageError(f"{item.nodeid}: no wide set {sorted(unknown)}; conftest.py lists {sorted(WIDE)}")
        keep = bool(wide & requested) if requested else not wide
        (selected if keep else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test with the mark `gpu(number)`, of one GPU if it has no number, where there are fewer."""
    needed = max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("gpu")), default=0)
    if needed:
        import torch

        if torch.cuda.device_count() < needed:
            pytest.skip(f"it needs {needed} CUDA GPU{'s' * (needed > 1)}, and this machine has fewer")


def pytest_collection_finish() -> None:
    """Leave the modules and the tests themselves out of garbage collections: some tests collect many times."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def modules_in_forks() -> Iterator[None]:
    """The subprocesses of the host (`python -m mplug_estimates.alternatives`) are forks that have torch imported.

    The script of the suites about start-up is a fork that has not.
    """
    with pytest.MonkeyPatch.context() as patch, forking_scripts(subprocess.run) as run:
        patch.setattr(subprocess, "run", forking_modules(run))
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no 'mount' here")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a process that ends just now may be in it still
