"""Plugins that the default run names and that are not installed: a run does without them unless the user names them."""

import pytest

from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.errors import UsageError
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug_testing.harness import tiny_run


def without(monkeypatch: pytest.MonkeyPatch, *labels: str) -> None:
    """Hide installed plugins."""
    entries = Registry.entries

    def visible(self: Registry, kind: str | None = None) -> list:
        return [one for one in (entries(self) if kind is None else entries(self, kind)) if one.label not in labels]

    monkeypatch.setattr(Registry, "entries", visible)


def test_a_run_does_without_the_default_kernel_and_strategy_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "kernels/flash", "kernels/triton", "kernels/sdpa", "parallel/dp")
    config = resolve(Registry(), default_settings(), {})
    assert (config.kernels.defaults, config.parallel.data) == ((), None)
    assert config.settings["kernels", "default"].source.endswith("; 'flash', 'triton' and 'sdpa' are not installed")


def test_of_a_list_in_the_default_run_the_installed_kernels_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {**default_settings(), **read_assignments(["kernels.default=[flash,sdpa,triton]"], "default.yaml")}
    without(monkeypatch, "kernels/sdpa")
    assert resolve(Registry(), base, {}).kernels.rivals == ("kernels/flash", "kernels/triton")
    without(monkeypatch, "kernels/triton")
    assert resolve(Registry(), base, {}).kernels.default == "kernels/flash"
    without(monkeypatch, "kernels/flash")
    found = resolve(Registry(), base, {})
    assert (found.kernels.defaults, found.settings["kernels", "default"].value) == ((), None)
    assert found.settings["kernels", "default"].source.endswith("; 'flash', 'sdpa' and 'triton' are not installed")


@pytest.mark.parametrize("field", ["kernels.default=sdpa", "parallel.data=dp"])
def test_what_the_user_names_is_never_dropped(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    without(monkeypatch, "kernels/sdpa", "parallel/dp")
    name = field.partition("=")[2]
    with pytest.raises(UsageError, match=f"'{name}'"):
        resolve(Registry(), default_settings(), read_assignments([field]))


@pytest.mark.parametrize(
    ("settings", "rivals"),
    [
        ([], ["flash", "triton", "sdpa"]),
        (["kernels.sdpa.backend=math"], ["flash", "triton", "sdpa"]),
        (["kernels.default=flex"], ["flex"]),
        (["kernels.default=[flex]"], ["flex"]),
        (["kernels.default=[flex,sdpa,flex]"], ["flex", "sdpa"]),
        (["kernels.default=[flex,sdpa]", "kernels.sdpa.backend=math"], ["flex", "sdpa"]),
        (["kernels.default=[]"], []),
    ],
)
def test_the_default_kernels_are_those_that_the_config_names(settings: list[str], rivals: list[str]) -> None:
    config = resolve(Registry(), default_settings(), read_assignments(settings))
    labels = tuple(f"kernels/{name}" for name in rivals)
    assert config.kernels.defaults == labels
    assert config.kernels.rivals == (labels if len(rivals) > 1 else ())
    assert {one.label for one in config.chosen if one.label.startswith("kernels/")} == {*labels}


LIST = {"kernels.default": ["flash", "sdpa", "triton", "flex"]}
EXPERTS = {"model.num_experts": 2, "model.num_experts_per_token": 1, "model.moe_ffn_hidden_size": 8}


@pytest.mark.parametrize(
    ("settings", "supplier"),
    [
        ({}, "kernels/sdpa"),
        ({"model.name": "gemma", "model.window": 4, "model.attention_types": ["window", "full"]}, "kernels/sdpa"),
        ({"model.name": "gemma", "model.attention_soft_cap": 2.0}, "plain torch"),
        ({"model.name": "gpt-oss", "model.head_dim": 8, **EXPERTS}, "plain torch"),
    ],
)
def test_of_a_list_on_a_cpu_sdpa_serves_attention_and_plain_torch_what_it_does_not(
    settings: dict[str, object], supplier: str
) -> None:
    filled = build_model(tiny_run({**LIST, **settings})).slots
    assert {one.supplier for one in filled if one.site.slot == "Attention.core"} == {supplier}


@pytest.mark.parametrize("word", ["flexx", "3", "[flex]"])
def test_a_word_of_the_default_kernels_that_is_no_plugin_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"kernels\.default"):
        resolve(Registry(), default_settings(), read_assignments([f"kernels.default=[sdpa,{word}]"]))


def test_observers_of_the_default_run_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {**default_settings(), **read_assignments(["extensions.tensorboard.every=3"], "default.yaml")}
    assert any(one.label == "extensions/tensorboard" for one in resolve(Registry(), base, {}).chosen)
    without(monkeypatch, "extensions/tensorboard")
    assert not [one for one in resolve(Registry(), base, {}).chosen if one.label == "extensions/tensorboard"]
    with pytest.raises(UsageError, match="tensorboard"):
        resolve(Registry(), base, read_assignments(["extensions.tensorboard.every=4"]))
