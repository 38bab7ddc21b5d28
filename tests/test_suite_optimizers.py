"""The suite of optimizers has teeth: a sound third-party one passes it, and every planted fault is caught by name."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import SkipTest

import pytest
from mplug_testing import Fault, OptimizerSuite
from mplug_testing.harness import tiny_run

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import build

PACKAGE = Path(__file__).parent / "third_party" / "nova-orthon"
Suite: type[OptimizerSuite] = runpy.run_path(str(PACKAGE / "tests" / "test_orthon.py"))["TestOrthon"]


class TestOrthon(Suite):  # type: ignore[misc, valid-type]
    """The package as it is passes the whole suite."""

    layouts = ("dp2", "pp2")

    @pytest.fixture(autouse=True)
    def planted(self, plant: Callable[..., None]) -> None:
        plant("nova-orthon")


class Planted(NamedTuple):
    """`old` becomes `new` in the package's source; `test` must say `words`."""

    old: str
    new: str
    test: str
    words: tuple[str, ...]


STEP = """    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        \"""Update every piece's master once.\"""
"""
ONE_PASS = """    one_pass = True

    @torch.no_grad()
    def step(self, scalars):
        self.update(scalars)
        for piece in self.pieces:
            if piece.weight is not None:
                piece.weight.copy_(torch.where(scalars.skip > 0, piece.weight, piece.master.bfloat16()))

    @torch.no_grad()
    def update(self, scalars):
"""
"""Orthon, made to write weights."""


class TestOrthonInOnePass(Suite):  # type: ignore[misc, valid-type]
    """The same package passes the whole suite where it does what the host did, and says so."""

    layouts = ("zero2",)

    @pytest.fixture(autouse=True)
    def planted(self, plant: Callable[..., None]) -> None:
        plant("nova-orthon", STEP, ONE_PASS)


@pytest.mark.wide("suites")
class TestOrthonUnderEveryStrategy(TestOrthon):
    layouts = None


@pytest.mark.wide("suites")
class TestOrthonInOnePassUnderEveryStrategy(TestOrthonInOnePass):
    layouts = None


REFERENCE = "test_updates_are_those_of_the_reference"
WRITE = "tensor.copy_(torch.where(skipped, tensor, value))"
FAULTS = {
    "a fused weight is taken for one matrix": Planted(
        "for box in piece.placement.boxes(rank)\n        ]",
        "for box in piece.placement.boxes(rank)\n        ]\n        self.matrices = [(slice(None), slice(None))]",
        REFERENCE,
        ("'fused matrices', the matrix that begins at (0, 0), differs from the reference",),
    ),
    "updates of wide matrices are too small": Planted(
        "longest = max(ahead[matrix].shape[-2:])",
        "longest = ahead[matrix].shape[-2]",
        REFERENCE,
        ("'wide matrix' differs from the reference",),
    ),
    "one coefficient of the polynomial is wrong": Planted(
        "2.0315", "2.0351", REFERENCE, ("'matrix' differs from the reference",)
    ),
    "bias is corrected one step late": Planted(
        'steps = self.state["steps"] + 1',
        'steps = self.state["steps"] + 2',
        REFERENCE,
        ("'table' differs from the reference",),
    ),
    "the learning rate is the config's": Planted(
        "- scalars.lr * direction",
        "- 1e-3 * direction",
        "test_the_learning_rate_is_read_at_every_step",
        ("the learning rate of the second step has no effect", "scalars.lr"),
    ),
    "gradients are not scaled": Planted(
        "rule.advance(piece.gradient * scalars.scale)",
        "rule.advance(piece.gradient)",
        "test_gradients_are_scaled",
        ("multiply every gradient by scalars.scale",),
    ),
    "everything decays": Planted(
        "scalars.weight_decay if piece.parameter.decays else 0.0",
        "scalars.weight_decay",
        "test_weight_decay_applies_where_the_plan_says",
        ("'matrix that does not decay' does not decay in the plan, and the step decays it", "piece.parameter.decays"),
    ),
    "the strength of weight decay is the config's": Planted(
        "scalars.weight_decay if piece.parameter.decays else 0.0",
        "0.1 if piece.parameter.decays else 0.0",
        "test_weight_decay_applies_where_the_plan_says",
        ("'matrix' decays in the plan, and scalars.weight_decay has no effect on it",),
    ),
    "skip is ignored": Planted(
        WRITE,
        "tensor.copy_(value)",
        "test_a_skipped_step_changes_nothing",
        ("a skipped step changes the weight 'matrix'",),
    ),
    "skip multiplies, and lets NaN through": Planted(
        WRITE,
        "tensor.lerp_(value, 1 - skipped.float())",
        "test_a_skipped_step_changes_nothing",
        ("a skipped step with nan gradients changes the weight 'matrix'",),
    ),
    "a skipped step moves the momentum": Planted(
        "_write(rule.state[name], value, skipped)",
        "rule.state[name].copy_(value)",
        "test_a_skipped_step_changes_nothing",
        ("a skipped step changes the state 'momentum' of 'matrix'",),
    ),
    "a skipped step is counted": Planted(
        'steps = self.state["steps"] + 1',
        "self.count = steps = getattr(self, 'count', 0) + 1",
        "test_a_skipped_step_is_not_remembered",
        ("a skipped step changes the bits of the weight 'table' in the next step",),
    ),
    "the momentum is no part of the state": Planted(
        "return self.rules[piece.name].state",
        "return {n: t for n, t in self.rules[piece.name].state.items() if n != 'momentum'}",
        "test_copied_state_continues_to_the_bit",
        ("from copied state", "the weight 'matrix'", "a step must depend only on"),
    ),
    "state is handed out as copies": Planted(
        "return self.rules[piece.name].state",
        "return {n: t.clone() for n, t in self.rules[piece.name].state.items()}",
        "test_state_is_live",
        ("the state 'momentum' of 'matrix' is a copy",),
    ),
    "the step count has a shape of its own": Planted(
        '"steps": torch.zeros((),',
        '"steps": torch.zeros((1,),',
        "test_state_is_what_checkpoints_can_hold",
        ("the state 'steps' of 'table' has shape (1,)",),
    ),
    "a state goes by the weight's name": Planted(
        'self.state = {"momentum": torch.zeros_like(piece.master)}',
        'self.state = {"weight": torch.zeros_like(piece.master)}',
        "test_state_is_what_checkpoints_can_hold",
        ("the state 'weight' of 'matrix'", "checkpoints"),
    ),
    "it writes the low-precision weight": Planted(
        "            for name, value in state.items():\n",
        "            if piece.weight is not None:\n                piece.weight.copy_(piece.master)\n"
        "            for name, value in state.items():\n",
        "test_it_leaves_low_precision_weights_to_the_host",
        ("it writes to the low-precision weight of 'matrix'", "or set one_pass"),
    ),
    "it updates a master of its own": Planted(
        "        self.pieces = pieces\n",
        "        from dataclasses import replace\n\n"
        "        self.pieces = [replace(piece, master=piece.master.clone()) for piece in pieces]\n",
        "test_it_updates_masters_in_place",
        ("it does not update the master of 'matrix' in place",),
    ),
    "it says that elements are enough": Planted(
        'needs: Literal["matrices"] = "matrices"',
        'needs: Literal["elements"] = "elements"',
        "test_what_it_needs_is_enough",
        ("of halves of pieces, although its needs are 'elements'", "IndexError"),
    ),
    "a trust ratio looks at the whole piece": Planted(
        """    needs: Literal["matrices"] = "matrices"

    def __init__(self, pieces: list[Piece], rank: int, config: "Orthon.Config") -> None:
        self.pieces = pieces
        self.rules: dict[str, Rule] = {
            piece.name: OrthogonalMomentum(piece, rank, config)
            if is_matrix(piece, config.tables)
            else Adam(piece, config)
            for piece in pieces
        }
""",
        """    needs = "elements"

    def __init__(self, pieces, rank, config):
        class Lamb(Adam):
            def advance(self, gradient):
                direction, state = super().advance(gradient)
                return direction / direction.norm(), state

        self.pieces, self.rules = pieces, {piece.name: Lamb(piece, config) for piece in pieces}
""",
        "test_what_it_needs_is_enough",
        ("its needs are 'elements'", "the weight 'matrix' differs if its halves are updated separately"),
    ),
    "it says one_pass, and leaves weights to the host": Planted(
        STEP,
        ONE_PASS.replace("piece.weight is not None", "False"),
        "test_one_pass_writes_weights",
        ("it sets one_pass, and the weight of 'matrix' is not its rounded master",),
    ),
    "it writes the weights before it updates": Planted(
        STEP,
        ONE_PASS.replace("        self.update(scalars)\n", "").replace(
            "bfloat16()))\n", "bfloat16()))\n        self.update(scalars)\n"
        ),
        "test_one_pass_writes_weights",
        ("the weight of 'matrix' is not its rounded master",),
    ),
    "it cuts masters off instead of rounding them": Planted(
        STEP,
        ONE_PASS.replace(
            "piece.master.bfloat16()", "(piece.master.view(torch.int32) & -65536).view(torch.float32).bfloat16()"
        ),
        "test_one_pass_writes_weights",
        ("the weight of 'matrix' is not its rounded master",),
    ),
    "a skipped step writes weights": Planted(
        STEP,
        ONE_PASS.replace("scalars.skip > 0", "scalars.skip > 1"),
        "test_one_pass_of_a_skipped_step_writes_no_weight",
        ("a skipped step changes the low-precision weight of 'matrix'",),
    ),
    "one_pass is no answer": Planted(
        'needs: Literal["matrices"] = "matrices"',
        'needs = "matrices"\n    one_pass = "weights"',
        "test_it_says_what_it_needs_and_is_built_without_memory",
        ("its `one_pass` is 'weights'; it must be True or False",),
    ),
    "what it needs is misspelt": Planted(
        'needs: Literal["matrices"] = "matrices"',
        'needs = "matrix"',
        "test_it_says_what_it_needs_and_is_built_without_memory",
        ("its `needs` is 'matrix'; it must be 'elements' or 'matrices'",),
    ),
    "building reads a value": Planted(
        "self.momentum, self.rms = config.momentum, config.rms",
        "self.momentum, self.rms = config.momentum, config.rms * max(1.0, float(piece.master.norm()) * 0)",
        "test_it_says_what_it_needs_and_is_built_without_memory",
        ("building it of tensors without memory", "raises"),
    ),
    "a step asks the device whether it is skipped": Planted(
        "skipped = scalars.skip > 0",
        "skipped = scalars.skip > 0\n        if skipped:\n            return",
        "test_a_step_does_not_wait_for_the_device",
        ("reads a tensor's value on the CPU", "__bool__"),
    ),
    "its config has no weight decay": Planted(
        "weight_decay: float = Field(",
        "decay: float = Field(",
        "test_its_config_has_the_rate_and_the_decay_that_the_schedule_reads",
        ("'weight_decay'",),
    ),
    "it fails on a rank without pieces": Planted(
        "        self.pieces = pieces\n",
        "        self.pieces, self.device = pieces, pieces[0].master.device\n",
        "test_it_takes_ranks_that_hold_padding_or_nothing",
        ("building it of no pieces, as on a rank without trained parameters", "IndexError"),
    ),
}


@pytest.mark.parametrize("planted", FAULTS.values(), ids=FAULTS)
def test_the_suite_catches(planted: Planted, plant: Callable[..., None]) -> None:
    plant("nova-orthon", planted.old, planted.new)
    with pytest.raises(Fault) as caught:
        getattr(Suite(), planted.test)()
    assert [word for word in planted.words if word not in str(caught.value)] == [], str(caught.value)


COUNTING = """        muon, steps = Muon(pieces, run.rank, self.config), []
        whole = muon.step

        def step(scalars):
            steps.append(scalars)
            whole(replace(scalars, lr=scalars.lr / len(steps)))

        muon.step = step
        return muon

    @hookimpl
    def captures(self):
        return True
"""
"""Orthon with a rate that falls by a count on the CPU, and the statement that its steps can be replayed."""


def test_the_suite_catches_a_number_that_a_replay_would_freeze(plant: Callable[..., None]) -> None:
    last = "        return Muon(pieces, run.rank, self.config)\n"
    plant("nova-orthon", last, COUNTING.replace("replace(", "__import__('dataclasses').replace("))
    with pytest.raises(
        Fault,
        match=r"states .captures., and in a replayed step, the weight '.*' has other bits",
    ):
        Suite().test_a_replayed_step_is_a_step()


def test_the_suite_catches_updates_that_depend_on_the_layout(plant: Callable[..., None]) -> None:
    plant(
        "nova-orthon", "config.momentum, config.rms\n", "config.momentum, config.rms / len(piece.placement.holders)\n"
    )
    with pytest.raises(Fault, match=r"under dp2 the weight '.*' has an error of .* after 2 steps"):
        Suite().test_a_layout_gives_the_weights_of_one_process("dp2")


def test_a_layout_that_the_author_names_may_not_be_refused(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("nova-orthon")
    monkeypatch.setattr(Suite, "layouts", None)
    with pytest.raises(SkipTest, match=r"^layout 'tp2' is refused: .* needs whole matrices"):
        Suite().test_a_layout_gives_the_weights_of_one_process("tp2")
    monkeypatch.setattr(Suite, "layouts", ("tp2",))
    with pytest.raises(Fault, match=r"^layout 'tp2' is refused; set 'settings' or 'layouts' .* needs whole matrices"):
        Suite().test_a_layout_gives_the_weights_of_one_process("tp2")


@pytest.mark.parametrize("settings", [{}, {"model.tie_embeddings": True}])
def test_a_layout_that_cuts_matrices_is_refused_before_a_process_starts(
    plant: Callable[..., None], settings: dict[str, object]
) -> None:
    plant("nova-orthon")
    for layout in ("tp2", "tp2pp2"):
        run = tiny_run({"optimizer.name": "orthon", "parallel.layout": layout, **settings})
        with pytest.raises(UsageError, match=r"optimizers/orthon needs whole matrices, and tp=2 cuts '.*without tp"):
            build_model(run)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (
            '{"rows": piece.master.sum(dim=-1)}',
            r"keeps a state 'rows' of '.*' of shape \(\d+,\), and the weight has shape \(\d+, \d+\)",
        ),
        ('{"weight": piece.master}', "keeps a state 'weight' of '.*': .*rename the state"),
    ],
    ids=["factored", "weight"],
)
def test_a_state_that_a_checkpoint_cannot_hold_is_refused_before_a_process_starts(
    plant: Callable[..., None], cli: Callable[..., Any], tmp_path: Path, tiny: list[str], states: str, said: str
) -> None:
    plant("nova-orthon", "return self.rules[piece.name].state", f"return {states}")
    result = cli("train", "--optimizer", "orthon", "--parallel", "dp2", *tiny, path=tmp_path / "planted-0")
    assert result.returncode == 2, result.stderr
    assert re.search(f"^mplug: optimizers/orthon {said}", result.stderr)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UsageError, match=said):  # whoever started the processes
        build(tiny_run({"optimizer.name": "orthon"}))
