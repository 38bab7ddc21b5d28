"""Datasets: the suites of both forms, mapped and streamed."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("datasets")


from mplug_testing import DataSuite

HERE = Path(__file__).parent
TINY: dict[str, Any] = {
    "data.name": "datasets",
    "data.validation_percent": 20,
    "trainer.seq_length": 128,
    "kernels.default": None,
}
MAPPED = "rows are encoded before the run, without blocks"
PLACE = "it is only the place of encoded rows"


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class Chats(DataSuite):
    plugin = "datasets"
    settings: ClassVar[dict[str, Any]] = {
        **TINY, "data.path": str(HERE / "chats.jsonl"), "data.form": "chat", "data.max_documents": 5,
    }  # fmt: skip
    examples: ClassVar[dict[str, Any]] = {
        "split": ["x"],
        "validation_split": ["test"],
        "validation_path": [str(HERE / "chats.jsonl")],
        "form": ["prompt"],
        "columns": [{"messages": "none"}],
        "damaged": ["refuse"],
        "tokenizer": ["no-such-tokenizer"],
        "tokenizer_options": [{"no_such_option": 1}],
        "template": ["llama3"],
        "template_variables": [{"bos_token": "<s>"}],
        "special_tokens": [["<|im_start|>"]],
    }
    beside: ClassVar[dict[str, Any]] = {"template_variables": {"data.template": str(HERE / "variable.jinja")}}
    without_effect: ClassVar[dict[str, str]] = {"block": MAPPED, "cache": PLACE}


@pytest.mark.wide(
    "data",
    quick=[
        "test_every_field_of_its_config_has_an_effect",
        "test_neither_importing_nor_configuring_it_imports_torch",
        "test_missing_data_is_refused_before_a_run_is_announced",
        "test_a_micro_batch_is_what_the_contract_says",
        "test_it_resumes_exactly",
        "test_the_splits_share_no_text",
        "test_every_sample_comes_once_an_epoch",
    ],
)
class TestChats(Chats):
    pass


@pytest.mark.wide("data")
class TestStreamedChats(Chats):
    settings: ClassVar[dict[str, Any]] = {**Chats.settings, "data.streaming": True, "data.block": 30}
    without_effect: ClassVar[dict[str, str]] = {"cache": PLACE}


OF_CONVERSATIONS = "only conversations have it, and this suite reads texts"


@pytest.mark.wide("data")
class TestTexts(DataSuite):
    plugin = "datasets"
    settings: ClassVar[dict[str, Any]] = {**TINY, "data.path": str(HERE / "texts.jsonl"), "trainer.seq_length": 32}
    examples: ClassVar[dict[str, Any]] = {
        **Chats.examples,
        "validation_path": [str(HERE / "texts.jsonl")],
        "columns": [{"text": "none"}],
    }
    without_effect: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("template", "template_variables", "too_long", "max_documents"), OF_CONVERSATIONS),
        "block": MAPPED,
        "cache": PLACE,
    }


@pytest.mark.wide("data")
class TestStreamedTexts(TestTexts):
    settings: ClassVar[dict[str, Any]] = {**TestTexts.settings, "data.streaming": True, "data.block": 10}
    without_effect: ClassVar[dict[str, str]] = {k: v for k, v in TestTexts.without_effect.items() if k != "block"}
