"""The suite for plugins of the kind `memory`: they make units keep less for backward and change no result.

    from mplug_testing import MemorySuite

    class TestRingo(MemorySuite):
        plugin = "ringo"
        settings = {"memory.ringo.every": 2}

Its tests compare runs with the plugin with the same runs without it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.registry.hooks import implemented
from mplug_testing.draws import drawing_attention, first_gradients
from mplug_testing.harness import STEPS, TinySettings, Trace, installed_plugins, tiny_run, train_ranks, train_steps
from mplug_testing.suite import PluginSuite, require

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.run.run import Run
    from mplug.training.assembly import Parts


class MemorySuite(PluginSuite):
    """The requirements for recomputation, offload and the like: a run with the plugin is bitwise equal to one without.

    `models` maps names to settings of further models, besides that of `settings`. `layouts` are the layouts under which
    the runs are compared (settings may follow a layout). `compilers` are values of `trainer.compile`, `precisions`
    values of `trainer.precision`.
    """

    kind = "memory"
    models: ClassVar[Mapping[str, TinySettings]] = {}
    layouts: ClassVar[tuple[str, ...]] = ()
    compilers: ClassVar[tuple[str, ...]] = ("aot_eager",)
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16")

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """Its own section below `memory`."""
        return {f"memory.{cls.plugin}": {}}

    @classmethod
    def section(cls) -> tuple[str, ...]:
        """`memory.NAME`."""
        return ("memory", cls.plugin)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each model, precision, layout and compiler."""
        for name, values in {
            "model": ("tiny", *self.models),
            "precision": self.precisions,
            "layout": self.layouts,
            "compiler": self.compilers,
        }.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    @classmethod
    def pair(cls, model: str = "tiny", **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of a run with the plugin, and of the run without it."""
        section = f"memory.{cls.plugin}"
        plugins = {name: v for name, v in cls.tiny().items() if name == section or name.startswith(f"{section}.")}
        rest = cls.models.get(model, cls.settings)
        named = {name.replace("__", "."): value for name, value in changes.items()}
        plain = {name: value for name, value in {**rest, **named}.items() if name not in plugins}
        return {**plain, **plugins}, plain

    @classmethod
    def evidence(cls, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The bytes that backward keeps on the device, and the operations of a step."""
        from mplug.training.assembly import build
        from mplug_testing.operations import step_seen

        run = tiny_run(settings)
        yield "kept bytes", kept_bytes(run, build(run))
        yield "operations", step_seen(settings)[0]

    def test_it_implements_a_hook(self) -> None:
        """Otherwise naming the plugin has no effect."""
        hooks = set(implemented(installed_plugins().load(self.entry()))) - {"configure"}
        require(hooks, f"'{self.plugin}' implements no hook of a run, so naming it does nothing")

    def test_a_run_with_it_is_the_run_without_it(self, model: str, precision: str) -> None:
        """Losses, gradients, weights and statistics are bitwise equal."""
        found, plain = self.pair(model, trainer__precision=precision)
        require_same([train_steps(found)], [train_steps(plain)])

    def test_a_compiled_run_with_it_is_the_run_without_it(self, model: str, compiler: str) -> None:
        """The same with compiled units."""
        with _compiling():
            found, plain = (train_steps(settings) for settings in self.pair(model, trainer__compile=compiler))
        require_same([found], [plain])

    def test_a_run_with_it_under_a_layout_is_the_run_without_it(self, layout: str) -> None:
        """The same on every rank."""
        from mplug.config.sources import read_assignments

        word, *assignments = layout.split()
        more = {".".join(key): setting.value for key, setting in read_assignments(assignments).items()}
        found, plain = ({**settings, "parallel.layout": word, **more} for settings in self.pair())
        ranks = tiny_run(found).mesh.world_size
        require_same(train_ranks(ranks, found), train_ranks(ranks, plain))

    def test_what_a_kernel_draws_is_drawn_again(self, model: str) -> None:
        """With attention whose dropout uses torch's generator: recomputation in backward drops the same elements."""
        calls = list[None]()
        with drawing_attention(calls):
            found, plain = (first_gradients(settings) for settings in self.pair(model, kernels__default=None))
        if not calls:
            raise SkipTest("this model has no attention in plain torch")
        name = _first_other(found, plain)
        require(
            not name,
            f"with it, the gradient of '{name}' differs if a kernel draws from torch's generator; restore the "
            f"generator's state before recomputation",
        )

    def test_less_stays_on_the_device(self, model: str) -> None:
        """Autograd saves fewer bytes of a forward pass on the device."""
        from mplug.training.assembly import build

        runs = [tiny_run(settings) for settings in self.pair(model)]
        found, plain = (kept_bytes(run, build(run)) for run in runs)
        require(found < plain, f"with it, backward keeps {found} bytes on the device, and without it {plain}")


def require_same(found: list[Trace], expected: list[Trace]) -> None:
    """Raise Fault unless the ranks of two runs have bitwise equal traces."""
    require(len(found) == len(expected), f"one run has {len(found)} ranks, the other {len(expected)}")
    for rank, (own, other) in enumerate(zip(found, expected, strict=True)):
        difference = _difference(own, other)
        require(not difference, f"with it, {difference} (rank {rank})")


def _difference(found: Trace, expected: Trace) -> str:
    """The first difference between two ranks' traces; empty if there is none."""
    for step in range(STEPS):
        for figure, ours, plain in (("loss", found.losses, expected.losses), ("norm", found.norms, expected.norms)):
            if ours[step] != plain[step]:
                return f"the {figure} of step {step + 1} is {ours[step]!r}, and without it {plain[step]!r}"
        if name := _first_other(_values(found.gradients[step]), _values(expected.gradients[step])):
            return f"the gradient of '{name}' at step {step + 1} has other bits"
        if name := _first_other(found.statistics[step], expected.statistics[step]):
            return f"the statistic '{name}' of step {step + 1} differs; is a recomputed result counted twice?"
    if name := _first_other(_values(found.weights), _values(expected.weights)):
        return f"'{name}' has other bits after {STEPS} steps"
    same = found.val_loss == expected.val_loss
    return "" if same else f"the validation loss is {found.val_loss!r}, and without it {expected.val_loss!r}"


def _values(boxes: "Mapping[str, list[tuple[tuple[int, ...], Tensor]]]") -> "dict[str, Tensor]":
    return {f"{name} from {start}": values for name, held in boxes.items() for start, values in held}


def _first_other(found: "Mapping[str, Tensor]", expected: "Mapping[str, Tensor]") -> str:
    import torch

    names = [*expected, *(name for name in found if name not in expected)]
    same = {name: name in found and name in expected and torch.equal(found[name], expected[name]) for name in names}
    return next((name for name, is_same in same.items() if not is_same), "")


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile from scratch, without torch's own warnings, which do not concern a plugin's test."""
    import warnings

    import torch

    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


def kept_bytes(run: "Run", parts: "Parts") -> int:
    """Bytes of the storages that autograd saves in the forward pass of one micro batch, without weights and sinks.

    The micro batch is the first of step 1. The gradient sinks are reset afterwards.
    """
    from torch.autograd.graph import saved_tensors_hooks

    tensors = [*parts.model.parameters().values(), *(sink.buffer for sink in parts.model.sinks.values())]
    lasting = {one.untyped_storage()._cdata for one in tensors}
    kept: dict[int, int] = {}

    def keep(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        if storage._cdata not in lasting:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    run.step = 1
    stepper: Any = parts.stepper
    stepper.begin_step(1)
    parts.model.module.train()
    batch = next(iter(parts.train_loader.take(run.config.trainer.global_batch_size)))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = parts.model.loss(stepper.entries(batch, 1))
    loss.backward()
    parts.model.sinks.begin_step()
    return sum(kept.values())
