"""Values that no run can use are refused at once, in one sentence that names the field as the user writes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from torch import nn

from mplug import UsageError
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments, read_file, read_yaml
from mplug.registry.bind_section import bind
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.metrics_file import read_lines
from mplug.run.prepare import prepare
from mplug_estimates.sizes import MAX_SUBMODULES, within_reason


def config_with(*assignments: str) -> Any:
    return resolve(Registry(), default_settings(), read_assignments(assignments))


def refusal(*assignments: str) -> str:
    with pytest.raises(UsageError) as refused:
        prepare(config_with(*assignments))
    return str(refused.value)


def test_settings_that_only_look_odd_are_accepted() -> None:
    """A trial of a few steps keeps its warm-up, a ramp may start at its end, and a strategy of data may be unused."""
    odd = ["trainer.steps=2", "schedule.warmup_steps=50", "schedule.batch_rampup.start=8", "parallel.data=fsdp"]
    odd += ["schedule.name=constant", "schedule.min_lr=1", "extensions.watchdog.timeout=0"]
    assert prepare(config_with(*odd)).config.trainer.steps == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: " + "{a: " * 3000 + "1" + "}" * 3000, "run.yaml:1: the value is nested more than 64 levels deep"),
        ("data:\n  path: " + "[" * 3000 + "]" * 3000, "run.yaml:2: the value is nested more than 64 levels deep"),
        (
            "b0: &b0 {x: 1}\n" + "".join(f"b{n}: &b{n} {{x: *b{n - 1}}}\n" for n in range(1, 99)),
            "with its aliases written out, the value is nested more than 64 levels deep",
        ),
        (
            "b0: &b0 {x: 1, y: 1}\n" + "".join(f"b{n}: &b{n} {{x: *b{n - 1}, y: *b{n - 1}}}\n" for n in range(1, 19)),
            "with its aliases written out, the value contains more than 100,000 values",
        ),
        ("trainer:\n  steps: \0\n", "run.yaml:2 is not YAML: the character #x0000 is not allowed"),
    ],
    ids=["mappings", "lists", "aliases deep", "aliases wide", "NUL"],
)  # fmt: skip
def test_a_text_that_is_too_deep_or_too_large_is_refused_with_its_line(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_yaml(text, "run.yaml")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_assignment_that_is_too_deep_is_refused() -> None:
    assert refusal("data.x=" + "[" * 3000 + "]" * 3000).startswith("data.x (--set): the value is nested more than 64")
    assert "64 levels" in refusal("data" + ".x" * 3000 + "=1")


def test_a_scalar_that_its_tag_cannot_read_stays_text() -> None:
    said = read_yaml("trainer:\n  steps: !!bool perhaps\n  seed: !!timestamp now\n  x: !!int ''\n", "run.yaml")
    assert [setting.value for setting in said.values()] == ["perhaps", "now", ""]


def test_an_endless_config_file_is_refused() -> None:
    with pytest.raises(UsageError, match="'/dev/zero': it is longer than"):
        read_file(Path("/dev/zero"))


# Sections of third parties.


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[Annotated[str, Field(max_length=3)]] = []


class Nested(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat(kind="cat")


class Section(BaseModel):
    """What a third party may think of."""

    model_config = ConfigDict(extra="forbid")
    samples: Literal["run", "epoch"] | Annotated[int, Field(gt=0)] | None = None
    nested: Nested = Nested()
    several: tuple[Nested, ...] = ()
    maybe: Nested | None = None
    either: Cat | Nested = Nested()
    paths: str | list[str] | dict[str, float] = ""
    rates: dict[str, Annotated[float, Field(le=1)]] = {}
    numbered: dict[int, int] = {}
    pair: tuple[int, str] = (0, "")
    plain: float = 0.0
    chosen: int = Field(1, alias="choice")
    odd: int = 1
    strict: Annotated[int, Field(strict=True)] = 1

    @field_validator("odd")
    @classmethod
    def _fails(cls, odd: int) -> int:
        return 1 // (odd - 13) or odd

    @model_validator(mode="after")
    def _fits(self) -> "Section":
        if self.plain > 10:
            raise ValueError("plain=11 is\nmore than 10")
        return self


DOG = {"kind": "dog", "tricks": ["sit", "stay"]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"samples": "foo"}, "samples: must be 'run' or 'epoch' or a valid integer, not 'foo'"),
        ({"samples": 0}, "samples: must be 'run' or 'epoch' or greater than 0, not 0"),
        ({"samples": [1]}, "samples: must be 'run' or 'epoch' or a valid integer, not [1]"),
        ({"nested": 3}, "nested: must be a section (a mapping of fields), not 3"),
        ({"nested": {"pte": 3}}, "nested.pte: unknown field; did you mean 'pet'? (fields: pet)"),
        ({"several": [{"pte": 3}]}, "several.0.pte: unknown field; did you mean 'pet'? (fields: pet)"),
        ({"maybe": {"pte": 3}}, "maybe.pte: unknown field; did you mean 'pet'? (fields: pet)"),
        ({"nested": {"pet": {"kind": "cow"}}}, "nested.pet.kind: must be 'cat' or 'dog', not 'cow'"),
        ({"nested": {"pet": {"lives": 1}}}, "nested.pet.kind: is required, because it selects the other fields"),
        ({"nested": {"pet": {"kind": "cat", "lives": "x"}}}, "nested.pet.lives: must be a valid integer, not 'x'"),
        ({"nested": {"pet": DOG}}, "nested.pet.tricks.1: must have at most 3 characters, not 'stay'"),
        ({"either": {"kind": "cat", "lives": "x"}}, "either.lives: must be a valid integer, not 'x'"),
        ({"paths": {"a": "x"}}, "paths.a: must be a valid number, not 'x'"),
        ({"paths": ["a", 3]}, "paths.1: must be a valid string, not 3"),
        ({"paths": 3}, "paths: must be a valid string or a list or a mapping, not 3"),
        ({"rates": {"dict": 2}}, "rates.dict: must be less than or equal to 1, not 2"),
        ({"numbered": {"x": 1}}, "numbered.x: has the key 'x', but a key must be a valid integer"),
        ({"pair": [1]}, "pair.1: is required"),
        ({"pair": ["x", "y"]}, "pair.0: must be a valid integer, not 'x'"),
        ({"plain": float("-inf")}, "plain: must be a finite number, not -inf"),
        ({"plain": 11}, ": plain=11 is more than 10"),
        ({"rates": {"a": float("-inf")}}, "rates.a: must be a finite number, not -inf"),
        ({"numbered": {1: 10**20}}, f"numbered.1: must be an integer of at most 63 bits ({2**63 - 1}), not {10**20}"),
        ({"choice": "x"}, "choice: must be a valid integer, not 'x'"),
        ({"choice": True}, "choice: must be a valid integer, not True"),
        ({"strict": "1"}, "strict: must be a valid integer, not '1'"),
        ({"plain": "x" * 10_000}, f"plain: must be a valid number, not '{'x' * 37}...{'x' * 38}'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_problem_names_the_field_as_the_user_writes_it(values: dict[str, Any], expected: str) -> None:
    config, problems = bind(Section, values)
    assert config is None
    assert [f"{'.'.join(problem.path)}: {problem.message}" for problem in problems] == [expected]


Unbounded = Annotated[float, Field(allow_inf_nan=True)]


class Inner(BaseModel):
    ceiling: float = float("inf")
    floor: float = 0.0


class Valid(BaseModel):
    """Has infinities where the user says nothing, and says where a user may."""

    model_config = ConfigDict(extra="forbid")
    betas: tuple[float, ...] = Field(default_factory=lambda: (0.9, float("inf")))
    inner: Inner = Field(default_factory=lambda: Inner(floor=float("-inf")))
    limit: Unbounded | None = None
    limits: dict[str, list[Unbounded]] | None = None
    workers: Annotated[int, BeforeValidator(lambda value: 8 if value is True else value)] = 0


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, None),
        ({"betas": [0.9, float("inf")]}, None),
        ({"inner": {"ceiling": float("inf"), "floor": float("-inf")}}, None),
        ({"limit": float("inf")}, None),
        ({"limit": float("-inf")}, None),
        ({"limits": {"a": [float("nan")]}}, None),
        ({"workers": True}, None),
        ({"betas": [float("inf")]}, ("betas", "0")),
        ({"inner": {"ceiling": float("-inf")}}, ("inner", "ceiling")),
        ({"inner": {"ceiling": 1.0, "floor": float("inf")}}, ("inner", "floor")),
        ({"workers": False}, ("workers",)),
    ],
    ids=str,
)
def test_a_section_is_refused_only_for_what_the_user_says_and_may_not_say(
    values: dict[str, Any], place: tuple[str, ...] | None
) -> None:
    assert [problem.path for problem in bind(Valid, values)[1]] == ([] if place is None else [place])


def test_a_fault_in_the_checks_of_a_section_names_its_line() -> None:
    _, (problem,) = bind(Section, {"odd": 13})
    assert problem.is_fault
    assert "ZeroDivisionError" in problem.message
    assert f"{__file__}:" in problem.message


# Hooks that look at the config.


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ('raise ValueError("every is odd")', "extensions/watch refuses the config (in 'configure'): every is odd"),
        ("return 1 // 0", "extensions/watch fails in 'configure': ZeroDivisionError"),
    ],
)
def test_a_hook_that_raises_is_one_sentence(
    plant: Callable[..., None], raised: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # importing the package leaves a file in the current folder
    observer = '    def run_started(self, run: "Run") -> None:'
    plant("acme-watch", observer, f"    def configure(self) -> None:\n        {raised}\n\n    @hookimpl\n{observer}")
    assert words in refusal("extensions.watch={}")


# Models.


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(nn.Identity())


def test_a_model_that_grows_without_end_stops_at_once() -> None:
    """A third party's model, whose own section has no bound."""
    config = config_with("model.num_layers=9999")
    words = r"models/nova is too large: one of its modules has more than 16,384 submodules.*num_layers=9999 \(--set\)"
    with pytest.raises(UsageError, match=words), torch.device("meta"), within_reason(config, "models/nova"):
        Deep(10**9)
    with torch.device("meta"), within_reason(config, "models/nova"):
        assert len(Deep(MAX_SUBMODULES).blocks) == MAX_SUBMODULES


@pytest.mark.parametrize("rows", [10**12, 2**50, 2**62])
def test_a_tensor_that_no_machine_holds_is_refused(rows: int) -> None:
    config = config_with("model.vocab_size=9999999")
    words = r"models/nova is too large: .*model\.vocab_size=9999999 \(--set\)"
    with pytest.raises(UsageError, match=words), torch.device("meta"), within_reason(config, "models/nova"):
        nn.Embedding(rows, 10**5)


def test_an_error_of_a_model_that_is_not_about_sizes_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), within_reason(config_with(), "models/nova"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


# Files of a run.


def test_a_run_whose_config_lacks_a_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {}\nkernels: {}\n")
    with pytest.raises(UsageError) as refused:
        read_file(path, needed=("model", "trainer", "kernels"))
    assert str(refused.value) == f"{path} lacks 1 section that every run has: trainer; restore the file"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\xff\xfe", "line 2 is not UTF-8"),
        (b'{"step": 1, "lo', "line 2 is not the record of a step"),
        (b'{"step": Infinity}', "line 2 is not the record of a step"),
        (b"[" * 100_000, "line 2 is not the record of a step"),
        (b"3", "line 2 is not the record of a step"),
    ],
    ids=["bytes", "cut", "infinity", "deep", "number"],
)
def test_a_damaged_line_of_metrics_is_named_and_a_cut_last_line_is_dropped(
    tmp_path: Path, line: bytes, words: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line)
    assert read_lines(path) == [(1, '{"step": 1}')]
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(UsageError, match=words) as refused:
        read_lines(path)
    assert str(path) in str(refused.value)
