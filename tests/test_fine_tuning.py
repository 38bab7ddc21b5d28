"""A run that begins with weights, or trains adapters, has the defaults of fine-tuning."""

from typing import Any

import pytest

from mplug import UsageError
from mplug.config.binding import RunConfig
from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping, merge, read_assignments
from mplug.registry.entry_points import BrokenPlugin, Registry
from mplug.registry.resolve import resolve
from mplug_pretrained.fine_tuning import fine_tuning_line, fine_tuning_settings

REGISTRY = Registry()
PRETRAINED = "checkpoint.pretrained=runs/base"


def config(*assignments: str) -> RunConfig:
    return resolve(REGISTRY, default_settings(), read_assignments(assignments))


@pytest.mark.parametrize(
    ("assignments", "lr", "steps", "warmup_steps", "weight_decay"),
    [
        ((), 5e-3, 950, 50, 0.1),
        (("checkpoint.pretrained=null", "adapters.lora=false"), 5e-3, 950, 50, 0.1),
        ((PRETRAINED,), 2e-5, 200, 10, 0.0),
        (("checkpoint.pretrained.path=runs/base", "checkpoint.pretrained.only=[blocks]"), 2e-5, 200, 10, 0.0),
        (("adapters.lora={}",), 2e-4, 200, 10, 0.0),
        ((PRETRAINED, "adapters.lora.rank=4"), 2e-4, 200, 10, 0.0),
        ((PRETRAINED, "optimizer.name=muon"), 2e-5, 200, 10, 0.0),
        ((PRETRAINED, "optimizer.name=lion", "adapters.lora={}"), 2e-6, 200, 10, 0.0),
        ((PRETRAINED, "model.name=mixtral", "model.preset=8b"), 2e-5, 200, 10, 0.0),
        ((PRETRAINED, "optimizer.lr=1e-3", "trainer.steps=9", "optimizer.weight_decay=0.2"), 1e-3, 9, 10, 0.2),
    ],
)
def test_weights_or_adapters_bring_the_defaults_of_fine_tuning_and_the_users_settings_win(
    assignments: tuple[str, ...], lr: float, steps: int, warmup_steps: int, weight_decay: float
) -> None:
    found = config(*assignments)
    assert found.optimizer.lr == lr
    assert found.optimizer.weight_decay == weight_decay
    assert (found.trainer.steps, found.schedule.warmup_steps) == (steps, warmup_steps)


def test_one_line_says_which_defaults_of_fine_tuning_stand() -> None:
    assert fine_tuning_line(config()) == ""
    every = ["schedule.name=constant", "optimizer.lr=1e-3", "optimizer.weight_decay=0", "schedule.warmup_steps=0"]
    assert fine_tuning_line(config(PRETRAINED, "trainer.steps=7", *every)) == ""
    assert fine_tuning_line(config(PRETRAINED, "adapters.lora={}", "trainer.steps=7")) == (
        "defaults of fine-tuning: optimizer.lr=0.0002, optimizer.weight_decay=0.0, schedule.name=cosine and "
        "schedule.warmup_steps=10; your settings replace them"
    )
    sources = config(PRETRAINED, "adapters.lora={}").sources()
    assert sources["optimizer.lr"] == "fine-tuning default of adapters/lora"
    assert sources["trainer.steps"].startswith("fine_tuning.yaml:")


def test_a_saved_run_keeps_its_settings() -> None:
    saved = merge(default_settings(), from_mapping({"model": {"name": "gpt", "preset": "nano"}}, "runs/x/config.yaml"))
    found = resolve(REGISTRY, saved, read_assignments([PRETRAINED]))
    assert (found.optimizer.lr, found.trainer.steps) == (5e-3, 950)


def test_an_optimizer_without_a_rate_for_fine_tuning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sgd = REGISTRY.load(REGISTRY.find("optimizers", "sgd"))
    monkeypatch.delattr(sgd, "fine_tuning")
    line = fine_tuning_line(config(PRETRAINED, "optimizer.name=sgd"))
    assert "optimizer.lr=0.1 is the default of 'sgd' for any run" in line


def test_two_adapters_with_different_rates_need_one_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(kind: str, word: str) -> Any:
        entry = REGISTRY.find(kind, word if word != "other" else "lora")
        return entry if word != "other" else type(entry)(**{**vars(entry), "name": "other"})

    class Other:
        fine_tuning = {"optimizer": {"lr": 1e-3}}  # as an author may write it

    class Two(Registry):
        find = staticmethod(found)

        def load(self, entry: Any) -> type[Any]:
            return Other if entry.name == "other" else REGISTRY.load(entry)

    from mplug_pretrained.fine_tuning import with_fine_tuning

    both = read_assignments(["adapters.lora={}", "adapters.other={}"])
    with pytest.raises(UsageError, match=r"optimizer\.lr for fine-tuning differ: 0\.0002 \(adapters/lora\) and 0\.001"):
        with_fine_tuning(Two(), default_settings(), both)
    own = merge(both, read_assignments(["optimizer.lr=1e-4"]))
    assert ("optimizer", "lr") in with_fine_tuning(Two(), default_settings(), own)
    monkeypatch.setattr(Other, "fine_tuning", {"optimizer": 1e-3})
    with pytest.raises(BrokenPlugin, match="'fine_tuning' is not a mapping of sections"):
        with_fine_tuning(Two(), default_settings(), both)


def test_the_file_of_the_host_sets_what_the_default_run_has() -> None:
    assert set(fine_tuning_settings()) <= set(default_settings())
