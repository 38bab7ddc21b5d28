"""Weights that a server loads while it answers, and the log probabilities of its tokens."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from mplug_bytes import ByteTokenizer
from sampled import CONTEXT, built

from mplug import RunError, UsageError
from mplug_sampling import Lanes, Ranks, Sampling, Text, complete, sample_key
from mplug_testing import run_workers

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
from mplug_serve import work
from mplug_serve.engine import Answer, Engine, Event, follow
from mplug_serve.requests import Refused
from served import GPT, sampled, serving


def of_rank(settings: dict[str, Any]) -> list[str]:
    """Four texts in two lanes, whose pages have no room for two whole texts."""
    run, sampler = built(settings)
    lanes = Lanes(sampler, 2, 20, Ranks(run, sampler), cache_tokens=20, page_size=4)

    def exchange(commands: Any) -> Any:
        values = [list(commands)]
        dist.broadcast_object_list(values, 0)
        return values[0]

    if run.rank:
        follow(lanes, exchange)
        return []
    engine = Engine(lanes, 20, exchange)
    thread = threading.Thread(target=engine.run)
    tokenizer, found = ByteTokenizer(), ["", "", "", ""]

    def send(index: int, event: Event) -> None:
        found[index] += event.text

    texts_of = [Text(tokenizer, tokenizer.encode("ab"), ()) for _ in found]
    engine.submit(
        [
            Answer(
                *(tuple(tokenizer.encode("ab")), Sampling(0.0, vocab_size=256), sample_key(0), 12, text),
                *(lambda event, index=index: send(index, event), time.monotonic() + 60),
            )
            for index, text in enumerate(texts_of)
        ]
    )
    thread.start()
    while engine.num_answers < 4:
        time.sleep(0.01)
    engine.stop()
    thread.join()
    assert engine.load["put_back"] > 0
    return found


def test_ranks_of_tensor_parallelism_compute_what_the_first_one_commands() -> None:
    settings = {**GPT, "parallel.layout": "tp2"}
    assert run_workers(2, of_rank, settings)[0] == [sampled("ab")] * 4


def test_tokens_have_the_log_probabilities_of_the_model() -> None:
    """The prompt is a text or its tokens; the numbers come back, with the token that ends the text."""
    prompt, whole = ByteTokenizer().encode("ab"), {"temperature": 0.7, "seed": 3, "max_tokens": 9}
    with serving() as (client, _):
        asked = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **whole}
        (choice,) = client.ask("/v1/completions", asked)[1]["choices"]
        assert client.ask("/v1/completions", {"prompt": "ab", **whole})[1]["choices"][0]["text"] == choice["text"]
        _, sampler = built(GPT)
        sampling = Sampling(0.7, vocab_size=256)
        (text,) = complete(Lanes(sampler, 3, CONTEXT), [prompt], [sample_key(3)], 9, sampling, ())
        assert choice["token_ids"] == text.tokens
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(text.log_probabilities, rel=1e-9)
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 9
        for wrong, sentence in (({"logprobs": 2}, "'logprobs'"), ({"stream": True}, "leave out 'stream'")):
            status, found = client.ask("/v1/completions", {**asked, **wrong})
            assert status == 400
            assert sentence in found["error"]["message"]
        status, found = client.ask("/v1/completions", {**asked, "prompt": [999]})
        assert (status, "the vocabulary has 256 tokens" in found["error"]["message"]) == (400, True)


def test_weights_are_loaded_when_the_texts_that_run_have_ended(tmp_path: Path) -> None:
    with serving() as (client, engine), ThreadPoolExecutor(4) as clients:
        assert client.ask("/update_weights_from_disk", {"model_path": str(tmp_path)})[0] == 400
        running: list[int] = []

        def load(folder: str) -> None:
            running.append(engine.load["running"])
            if folder == "other":
                raise UsageError("it is another model")

        engine.load_weights = load
        asked = [clients.submit(client.completion, "ab", max_tokens=30) for _ in range(4)]
        while not engine.load["running"]:
            time.sleep(0.001)
        engine.load_folder("some").result(20)
        with pytest.raises(Refused, match="it is another model"):
            engine.load_folder("other").result(20)
        assert running == [0, 0]
        assert {one.result() for one in asked} == {client.completion("ab", max_tokens=30)}


def test_a_folder_whose_client_has_gone_is_not_loaded_and_weights_loaded_in_part_end_the_server() -> None:
    with serving(started=False) as (_, engine):
        loaded: list[str] = []

        def load(folder: str) -> None:
            loaded.append(folder)
            raise RunError("the disk is gone")

        engine.load_weights = load
        assert engine.load_folder("gone").cancel()
        waiting = engine.load_folder("broken")
        with pytest.raises(RunError, match="the disk is gone"):
            engine.run()
        assert loaded == ["broken"]
        with pytest.raises(Refused, match="could not be loaded whole"):
            waiting.result(0)


def test_only_texts_that_were_put_back_begin_while_weights_wait() -> None:
    with serving(started=False) as (_, engine):
        text = Text(ByteTokenizer(), [1], frozenset())
        old, new = (Answer((1,), Sampling(0.0), 0, 9, text, [].append, 1e9) for _ in range(2))
        old.taken.append(2)
        engine.submit([new])
        engine._texts.waiting.appendleft(old)
        engine.load_folder("some")
        engine._step()
        assert [*engine._texts.running.values()] == [old]
        assert [*engine._texts.waiting] == [new]


def test_a_folder_is_refused_before_a_weight_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, sampler = built(GPT)
    for folder, sentence in ((tmp_path / "none", "is no folder"), (tmp_path, "no installed format reads")):
        with pytest.raises(UsageError, match=sentence):
            work.load_weights(run, sampler, str(folder))
    with pytest.raises(UsageError, match=r"cannot be read: .*too long"):
        work.load_weights(run, sampler, str(tmp_path / ("x" * 5000)))

    def fails(*_: Any) -> None:
        raise UsageError("two copies differ")

    monkeypatch.setattr(work, "_refuse_folder", lambda *_: None)
    monkeypatch.setattr("mplug_pretrained.public_load.load_public_for_inference", fails)
    with pytest.raises(RunError, match="loaded in part: two copies differ"):
        work.load_weights(run, sampler, str(tmp_path))
