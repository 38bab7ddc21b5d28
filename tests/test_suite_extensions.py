"""The suite for extensions: a sound observer passes it, and it catches what authors of observers get wrong."""

from collections.abc import Callable

import pytest
import torch
from mplug_testing import ExtensionSuite, Fault


class Plotter(ExtensionSuite):
    plugin = "plotter"
    settings = {"extensions.plotter.every": 2}
    files = ("loss.svg",)


def test_a_suite_computes_with_one_thread_however_many_there_are() -> None:
    """Threads that wait for each other made a suite of observers take minutes on two busy cores."""
    before, suite = torch.get_num_threads(), Plotter()
    torch.set_num_threads(2)
    suite.setup_method()
    within = torch.get_num_threads()
    suite.teardown_method()
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (within, after) == (1, 2)


@pytest.mark.wide("suites")
def test_a_sound_observer_passes(own_tests: Callable[..., str]) -> None:
    assert "failed" not in own_tests("nova-plotter")


PATH = 'self.path = run.directory / "loss.svg"'
POINT = "loss = record.get(name)"
TOLD = '''def step_finished(self, record: Record) -> None:
        """Add a point; now and then draw."""'''
PUBLISHED = "aside.replace(self.path)"
ADDED = "    def _add(self, record: Record) -> None:"
DECAYS = """    @hookimpl
    def wrap_model(self, run, model):
        from mplug import WeightExchange

        def decay():
            for weight in model.parameters().values() if run.step else ():
                weight.data.mul_(0.999)

        model.exchanges.append(WeightExchange(begin=decay, wait=None))

"""
CHILD = "import subprocess as s; self.viewer = s.Popen(['cat'], stdin=s.PIPE)"
THREAD = "import threading as t; t.Thread(target=t.Event().wait, name='drawing', daemon=True).start()"

FAULTS = {
    "the file begins anew at a resume": (
        'records(run.directory / "metrics.jsonl")',
        "()",
        lambda: Plotter().test_its_files_tell_of_the_whole_run_after_a_resume(),
        "after a resume 'loss.svg' lacks ",
    ),
    "its hooks are not marked": (
        "from mplug import Record, hookimpl",
        "from mplug import Record\n\n\ndef hookimpl(function):\n    function.__name__ += '_'\n    return function",
        lambda: Plotter().test_it_keeps_the_contract(),
        "'run_started' has the name of a hook but no @hookimpl",
    ),
    "a hook answers for another": (
        "    @hookimpl\n    def run_failed(self)",
        "    @hookimpl(specname='run_started')\n    def run_failed(self)",
        lambda: Plotter().test_its_hooks_are_called_in_the_order_of_a_run(),
        "'run_failed' is called 1 time in a run of 4 steps, not 0; does its @hookimpl name another hook?",
    ),
    "a field is ignored": (
        "% self.config.every == 0",
        "% 2 == 0",
        lambda: Plotter().test_every_field_of_its_config_has_an_effect(),
        "the field 'every' of 'plotter' has no effect",
    ),
    "a hook raises": (
        POINT,
        "loss = record[name]",
        lambda: Plotter().test_no_hook_of_it_raises(None),
        "'step_finished' raises KeyError: 'val_loss'",
    ),
    "a hook raises where a run fails": (
        "def run_failed(self) -> None:",
        "def run_failed(self) -> None:\n        self.error.add_note('plotted')",
        lambda: Plotter().test_no_hook_of_it_raises(3),
        "'run_failed' raises AttributeError: 'Plotter' object has no attribute 'error'",
    ),
    "the record is rounded for all": (
        POINT,
        "loss = record[name] = round(record.get(name, 0.0), 1)",
        lambda: Plotter().test_it_leaves_the_record_as_it_is(),
        "'step_finished' changes the record's 'loss'",
    ),
    "a figure is taken out of the record": (
        POINT,
        "loss = record.pop(name, None)",
        lambda: Plotter().test_it_leaves_the_record_as_it_is(),
        "'step_finished' changes the record's 'loss'",
    ),
    "a name is drawn from Python's random numbers": (
        'self.path.with_name(".loss.svg.partial")',
        "self.path.with_name(f'.{__import__(\"random\").random()}.partial')",
        lambda: Plotter().test_it_draws_no_random_numbers(),
        "'step_finished' changes the state of Python's global random numbers",
    ),
    "torch is seeded": (
        PATH,
        f"{PATH}; __import__('torch').manual_seed(20011)",
        lambda: Plotter().test_it_draws_no_random_numbers(),
        "'run_started' changes the state of torch's global random numbers",
    ),
    "the run is stopped": (
        TOLD,
        'def step_finished(self, run, record):\n        run.stop_requested = record["loss"] > 1',
        lambda: Plotter().test_a_run_with_it_is_the_run_without_it(),
        "with it, the run ends after step",
    ),
    "the weights are changed": (
        ADDED,
        DECAYS + ADDED,
        lambda: Plotter().test_a_run_with_it_is_the_run_without_it(),
        "with it, the loss of step 2 is",
    ),
    "a resumed run is not expected": (
        PATH,
        f"{PATH}; (run.directory / 'plot.lock').touch(exist_ok=False)",
        lambda: Plotter().test_it_survives_a_resume(),
        "'run_started' raises FileExistsError",
    ),
    "a file stays open": (
        PATH,
        f"{PATH}; self.log = (run.directory / 'plot.log').open('w')",
        lambda: Plotter().test_it_leaves_nothing_open_or_running(3),
        "plot.log",
    ),
    "a thread goes on": (
        PATH,
        f"{PATH}; {THREAD}",
        lambda: Plotter().test_it_leaves_nothing_open_or_running(None),
        "a run with it leaves the thread 'drawing' running",
    ),
    "a child process goes on": (
        PATH,
        f"{PATH}; {CHILD}",
        lambda: Plotter().test_it_leaves_nothing_open_or_running(None),
        "is still running",
    ),
    "a temporary file stays": (
        PUBLISHED,
        "self.path.write_bytes(aside.read_bytes())",
        lambda: Plotter().test_it_writes_the_files_that_it_says_and_no_other(),
        "it writes '.loss.svg.partial' in the run folder, and `files` does not name it",
    ),
    "it writes where the user happens to stand": (
        PATH,
        "self.path = Path('loss.svg')",
        lambda: Plotter().test_it_writes_the_files_that_it_says_and_no_other(),
        "outside of the run folder",
    ),
    "it never writes": (
        "if self.path is not None and self.training:",
        "if self.path is None and self.training:",
        lambda: Plotter().test_it_writes_the_files_that_it_says_and_no_other(),
        "`files` names 'loss.svg', and a run of 4 steps writes no such file",
    ),
    "every rank writes": (
        "if run.rank != 0 or run.directory is None:",
        "if run.directory is None:",
        lambda: Plotter().test_it_works_on_every_rank(),
        "ranks 0 and 1 both write '.loss.svg.partial'; write it on rank 0 only, or one file per rank",
    ),
    "only rank 0 is thought of": (
        "        if self.path is not None:\n            self._add(record)",
        "        if self.path.parent.exists():\n            self._add(record)",
        lambda: Plotter().test_it_works_on_every_rank(),
        "'step_finished' raises AttributeError: 'NoneType' object has no attribute 'parent' on rank 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches_an_observer_of_which(fault: str, plant: Callable[..., None]) -> None:
    old, new, check, words = FAULTS[fault]
    plant("nova-plotter", old, new)
    with pytest.raises(Fault) as caught:
        check()
    assert words in str(caught.value)
