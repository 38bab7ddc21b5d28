"""Checkpoints of other libraries: what a form supplies, and what the host refuses before anything is written."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from command_line import Cli
from distributions import installed
from safetensors.torch import load_file
from torch import Tensor

from mplug import UsageError
from mplug.cli.options import PluginName
from mplug.errors import PluginError
from mplug.model.build import build_model
from mplug.model.model import Model
from mplug.run.prepare import prepare
from mplug_checkpoint.new_run import NewTensor, _read
from mplug_pretrained import Factor, ForeignCheckpoint, ForeignTensor, Link, Part
from mplug_pretrained.external_form import conversion
from mplug_pretrained.foreign_match import match
from mplug_pretrained.transfer import fill_ours, fill_theirs
from mplug_saving.folder import read_valid
from mplug_testing.harness import tiny_config

GPT = {"model.num_layers": 1}
LLAMA = {"model.name": "llama", **tiny_models.DECODER, "model.num_layers": 1, "model.vocab_size": 260}
ADAM = ("exp_avg", "exp_avg_sq")


class Held(ForeignCheckpoint):
    """A checkpoint in memory. `parts` gives the dimension in which tensors are cut into two parts; None: copies."""

    step = 7

    def __init__(self, values: Mapping[str, Tensor], parts: Mapping[str, int | None] | None = None) -> None:
        self.path, self.values, self.parts = Path("held"), dict(values), dict(parts or {})
        self.tensors = {name: self._described(name) for name in values if "/" not in name}

    def _described(self, name: str) -> ForeignTensor:
        states = {key: None for key in ADAM if f"{name}/{key}" in self.values}
        numbers = {"step": 7.0} if states else {}
        parts = 2 if name in self.parts else 1
        return ForeignTensor(tuple(self._part(name, 0).shape), {**states, **numbers}, parts)

    def _part(self, name: str, part: int) -> Tensor:
        dim = self.parts.get(name.partition("/")[0])
        return self.values[name] if dim is None else self.values[name].chunk(2, dim)[part]

    def read(
        self, tensor: str, start: Sequence[int], shape: Sequence[int], state: str = "weight", part: int = 0
    ) -> Tensor:
        return self._part(tensor if state == "weight" else f"{tensor}/{state}", part)[box(start, shape)]


def model_of(settings: Mapping[str, Any]) -> Model:
    return build_model(prepare(tiny_config(settings)))


def own_names(model: Model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(one.shape, generator=generator) for name, one in model.placements.items()}


def box(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))


def public_names(model: Model, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published form of these values."""
    made, found = conversion(model), {}
    for name, targets in made.public.items():
        found[name] = torch.empty(made.shape(name))
        fill_theirs(targets, found[name], lambda own, start, shape: ours[own][box(start, shape)])
    return found


def read_back(model: Model, held: Held) -> dict[str, Tensor]:
    """What an import reads for each parameter."""
    found, values = match(model, held), {}
    for name, placement in model.placements.items():
        values[name] = torch.full(placement.shape, float("nan"))
        fill_ours(found.links[name], (0,) * len(placement.shape), values[name], found.reader())
    return values


def require_read(model: Model, held: Held, expected: Mapping[str, Tensor]) -> None:
    found = read_back(model, held)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_tensors_have_own_names_or_those_of_the_published_form_with_or_without_prefix() -> None:
    model = model_of(LLAMA)
    ours = own_names(model)
    public = public_names(model, ours)
    assert {name.partition(".")[0] for name in public} == {"model", "lm_head"}
    short = {name.removeprefix("model."): one for name, one in public.items()}
    for values in (ours, public, short):
        require_read(model, Held(values), ours)


def test_a_tied_parameter_may_have_any_of_its_names() -> None:
    model = model_of({**GPT, "model.tie_embeddings": True})
    ours = own_names(model)
    ((first, *others),) = model.plan.tied
    renamed = {(others[0] if name == first else name): one for name, one in ours.items()}
    both = {**ours, others[0]: ours[first]}
    for values in (ours, renamed, both):
        require_read(model, Held(values), ours)


def read_embedding(model: Model, values: Mapping[str, Tensor]) -> Tensor:
    name = "embedding.token.weight"
    return _read(NewTensor(name, "weight", "float32", model.placements[name].shape), match(model, Held(values)))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_head_beside_a_tied_embedding_must_be_equal_to_it(prefix: str) -> None:
    """Under both of our names, and under the published names with and without the prefix."""
    model = model_of({**LLAMA, "model.tie_embeddings": True})
    ours = own_names(model)
    ((first, second),) = model.plan.tied
    public = {name.removeprefix(prefix): one for name, one in public_names(model, ours).items()}
    for names, key in ((ours, second), (public, "lm_head.weight")):
        values = {**names, key: ours[first]}
        assert torch.equal(read_embedding(model, values), ours[first])
        with pytest.raises(UsageError, match=f"'{key}' and '.*' have different values"):
            read_embedding(model, {**values, key: ours[first] * 2})
        with pytest.raises(UsageError, match=f"'{key}' has shape"):
            read_embedding(model, {**values, key: ours[first][:-1]})


def test_parts_of_tensor_parallel_ranks_are_joined_where_the_plan_knows_how() -> None:
    """Column-parallel and row-parallel matrices, copied norms; reads cross the border of two parts."""
    model = model_of(LLAMA)
    ours = own_names(model)
    public = public_names(model, ours)
    cut: dict[str, int | None] = dict.fromkeys(public)
    for dim, words in ((0, ("q_proj", "k_proj", "v_proj", "gate", "up_proj", "lm_head")), (1, ("o_proj", "down_proj"))):
        cut |= {name: dim for name in public if any(word in name for word in words)}
    held = Held(public, cut)
    assert {one.parts for one in held.tensors.values()} == {2}
    require_read(model, held, ours)


def test_parts_of_several_segments_are_refused() -> None:
    """Queries, keys and values in one tensor: the parts may be cut through each of them, or through the whole."""
    model = model_of(GPT)
    held = Held(own_names(model), {"blocks.0.attn.qkv.weight": 0})
    with pytest.raises(UsageError, match=r"'blocks.0.attn.qkv.weight' into 2 parts .* several segments .* how to join"):
        match(model, held)
    thirds = Held(own_names(model))
    thirds.tensors["blocks.0.attn.out.weight"] = ForeignTensor((32, 11), parts=3)
    with pytest.raises(UsageError, match=r"has shape \(32, 11\) in each of 3 parts, but .* needs \(32, 32\)"):
        match(model, thirds)


def test_another_model_is_refused_with_what_is_absent_unused_and_wrong() -> None:
    model = model_of(GPT)
    ours = own_names(model)
    values = {name: one for name, one in ours.items() if name != "head.norm.weight"}
    for other, words in (
        ({"blocks.1.norm1.weight": torch.ones(32)}, "no counterpart of 'head.norm.weight'; .* not use 'blocks.1.no"),
        ({"head.norm.weight": torch.ones(33)}, r"'head.norm.weight' has shape \(33,\), but .* needs \(32,\)"),
    ):
        with pytest.raises(UsageError, match=words):
            match(model, Held({**values, **other}))


def test_links_of_a_form_must_describe_every_element() -> None:
    class Half(Held):
        def links(self, model: Model) -> dict[str, list[Link]]:
            found = {}
            for name, one in model.placements.items():
                dims = tuple((Factor(str(dim), size, 0, size // 2),) for dim, size in enumerate(one.shape))
                found[name] = [Link(Part(name, dims), Part(name, dims))]
            return found

    model = model_of(GPT)
    with pytest.raises(UsageError, match=r"its links describe \d+ elements of '.*', which has \d+"):
        match(model, Half(own_names(model)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (torch.zeros(3), r"torch.float32 \(3,\) for a box of shape \(32,\)"),
        (torch.zeros(32, dtype=torch.int64), "torch.int64"),
        ([0.0] * 32, "list"),
    ],
)
def test_a_read_that_breaks_the_contract_is_an_error_of_the_plugin(answer: Any, words: str) -> None:
    model = model_of(GPT)
    held = Held(own_names(model))
    found = match(model, held)
    held.read = lambda *_: answer  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=f"Held.read returned {words}"):
        found.reader()("head.norm.weight", (0,), (32,))


# Through the command: a form of another distribution.

CODE = """
import torch
from mplug_pretrained import ForeignCheckpoint, ForeignTensor, Format
SHAPES = {shapes!r}
STATES = {states!r}
FAILS = {fails!r}

class Checkpoint(ForeignCheckpoint):
    step = 7

    def __init__(self, folder):
        self.path = self.paht if FAILS == "constructor" else folder
        self.tensors = {{name: ForeignTensor(tuple(shape), dict(STATES)) for name, shape in SHAPES.items()}}

    def read(self, tensor, start, shape, state="weight", part=0):
        if tensor == FAILS:
            raise OSError(5, "Input/output error")
        if FAILS == "nan":
            return torch.full(tuple(shape), float("nan"))
        if FAILS == "bug":
            return SHAPES["absent"]
        return torch.full(tuple(shape), {{"weight": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}}[state])

class Acme(Format):
    def open(self, folder):
        return folder if FAILS == "type" else Checkpoint(folder)

class Plain:
    Config, __init__ = Format.Config, Format.__init__
"""
POINTS = "[mplug.formats]\nacme = acme_forms:Acme\nplain = acme_forms:Plain\ngone = acme_gone:X\n"


@pytest.fixture
def form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a distribution with the format 'acme'."""

    def install(states: Mapping[str, float | None] | None = None, fails: str = "") -> None:
        shapes = {name: one.shape for name, one in model_of(GPT).placements.items()}
        code = CODE.format(shapes=shapes, states=dict(states or {}), fails=fails)
        monkeypatch.syspath_prepend(installed(tmp_path / "site", "acme-forms", POINTS, code))
        monkeypatch.delitem(sys.modules, "acme_forms", raising=False)

    return install


def words(tmp_path: Path, form: str = "acme", **settings: Any) -> list[str]:
    tiny = Path(__file__).parents[1] / "testing" / "src" / "mplug_testing" / "tiny.yaml"
    own = [word for name, value in {**GPT, **settings}.items() for word in ("--set", f"{name}={value}")]
    folder = tmp_path / "theirs"
    folder.mkdir(exist_ok=True)
    return ["checkpoint", "import", "--from", form, str(folder), "--name", "new", "--config", str(tiny), *own]


def test_a_distribution_adds_a_form_whose_states_are_imported(
    form: Callable[..., None], tmp_path: Path, cli_here: Cli
) -> None:
    form(STATES)
    result = cli_here(*words(tmp_path, **{"trainer.steps": 8}))
    assert result.returncode == 0, result.stderr
    assert "it also has the optimizer's states after step 7; continue: mplug train --resume --name new" in result.stdout
    path = tmp_path / "runs" / "new" / "checkpoints" / "step_00000007"
    manifest = read_valid(path)
    assert (manifest["step"], manifest["samples"], manifest["loader"]) == (7, 0, {})
    assert manifest["imported"] == f"acme: {tmp_path / 'theirs'}"
    found = {name.partition("@")[0]: one for name, one in load_file(path / "rank00000.safetensors").items()}
    for key, value in (("weight", 1.0), ("exp_avg", 2.0), ("exp_avg_sq", 3.0), ("step", 7.0)):
        assert bool((found[f"blocks.0.attn.qkv.weight/{key}"] == value).all())


STATES = {"exp_avg": None, "exp_avg_sq": None, "step": 7.0}


@pytest.mark.parametrize(
    ("states", "optimizer", "reason"),
    [
        ({}, "adamw", "it has no optimizer states that mplug reads"),
        ({"exp_avg": None, "step": 7.0}, "adamw", "keeps exp_avg, exp_avg_sq and step of .* has exp_avg and step of"),
        ({"exp_avg": None, "exp_avg_sq": None}, "adamw", "and the checkpoint has exp_avg and exp_avg_sq of"),
        ({**STATES, "exp_avg": 1.0}, "adamw", "and the checkpoint has exp_avg, exp_avg_sq and step"),
        (STATES, "lion", "optimizer 'lion' keeps exp_avg"),
    ],
)
def test_states_of_another_optimizer_are_not_imported(
    states: dict[str, Any], optimizer: str, reason: str, form: Callable[..., None], tmp_path: Path, cli_here: Cli
) -> None:
    form(states)
    result = cli_here(*words(tmp_path, **{"optimizer.name": optimizer}))
    assert result.returncode == 0, result.stderr
    assert re.search(reason, result.stdout), result.stdout
    manifest = read_valid(tmp_path / "runs" / "new" / "checkpoints" / "step_00000000")
    assert all(name.endswith("/weight") for name in manifest["tensors"])


def test_an_import_that_fails_while_it_reads_leaves_nothing(
    form: Callable[..., None], tmp_path: Path, cli_here: Cli
) -> None:
    form(fails="head.norm.weight")
    result = cli_here(*words(tmp_path))
    assert result.returncode == 1
    assert "cannot read 'head.norm.weight' from '" in result.stderr
    assert "Input/output error" in result.stderr
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "new").mkdir(parents=True)
    (tmp_path / "runs" / "new" / "notes.txt").touch()
    result = cli_here(*words(tmp_path))
    assert result.returncode == 2
    assert "exists already and is no empty folder" in result.stderr
    assert [one.name for one in (tmp_path / "runs" / "new").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("fails", "name", "status", "sentence"),
    [
        ("constructor", "acme", 1, "the format 'acme' failed to open '"),
        ("constructor", "acme", 1, "with AttributeError: 'Checkpoint' object has no attribute"),
        ("type", "acme", 1, "which is no mplug_pretrained.ForeignCheckpoint"),
        ("bug", "acme", 1, "Checkpoint.read failed on 'embedding.token.weight' (weight) of"),
        ("nan", "acme", 2, "has NaN, or no values at all, for some elements of 'embedding.token.weight/weight'"),
        ("", "acmee", 2, "no plugin 'acmee' of kind 'formats' is installed; did you mean 'acme'? (installed: acme, "),
        ("", "plain", 2, "is no subclass of mplug_pretrained.Format"),
        ("", "gone", 2, "No module named 'acme_gone'"),
        ("", "huggingface", 2, "this format has no import; if '"),
    ],
)
def test_a_form_that_is_absent_or_broken_and_values_that_are_no_numbers_are_errors(
    fails: str, name: str, status: int, sentence: str, form: Callable[..., None], tmp_path: Path, cli_here: Cli
) -> None:
    form(fails=fails)
    result = cli_here(*words(tmp_path, name))
    assert result.returncode == status
    assert sentence in result.stderr
    assert not (tmp_path / "runs").exists()


def test_the_shell_completes_installed_formats(form: Callable[..., None]) -> None:
    form()
    parameter: Any = SimpleNamespace()
    assert [item.value for item in PluginName("formats").shell_complete(parameter, parameter, "ac")] == ["acme"]
