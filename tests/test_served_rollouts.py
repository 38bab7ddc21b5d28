"""Rollouts of a server: `mplug serve` completes prompts with the log-probabilities that the trainer computes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sampled import built

from mplug import RunError, UsageError
from mplug.training.assembly import build
from mplug_sampling import Lanes
from mplug_testing.harness import in_fp64, tiny_run
from mplug_testing.parity import require_parity

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
from mplug_bytes import ByteTokenizer  # noqa: E402
from mplug_rollouts.config import ServerConfig  # noqa: E402
from mplug_rollouts.server import Client  # noqa: E402
from mplug_serve.api import Served, application  # noqa: E402
from mplug_serve.engine import Engine  # noqa: E402
from mplug_serve.limits import Limits  # noqa: E402

HERE = Path(__file__).parent.parent / "plugins/data/rollouts/tests"
TINY: dict[str, Any] = {
    "data.name": "rollouts",
    "data.path": str(HERE / "prompts.jsonl"),
    "data.rewards": [f"{HERE / 'rewarding.py'}:share_of_a"],
    "data.num_generations": 4,
    "data.max_tokens": 7,
    "data.per_sample": 2,
    "data.temperature": 0.8,
    "objectives.grpo.temperature": 0.8,
    "trainer.seq_length": 48,
    "trainer.global_batch_size": 4,
    "kernels.default": None,
}


@contextmanager
def serving(loads_from: Path, load: Any = None, key: str | None = None) -> Iterator[str]:
    """The address of a server with the first weights of the run."""
    run = tiny_run(in_fp64(TINY))
    model = build(run).model
    fields = run.config.model.model_dump()
    _, sampler = built({f"model.{name}": value for name, value in fields.items() if name != "name"})
    for name, parameter in sampler.model.parameters().items():
        parameter.data.copy_(model.parameters()[name].data)
    tokenizer, limits = ByteTokenizer(), Limits(48, 4, 99, 40, 9999, 60, 5)
    engine = Engine(Lanes(sampler, 4, 48, cache_tokens=96, page_size=4), 99, lambda commands: commands, load)
    served = Served("tiny", tokenizer, tokenizer.encode, None, frozenset([tokenizer.eod]), 257, loads_from)
    server = uvicorn.Server(uvicorn.Config(application(served, engine, limits, key), port=0, log_level="error"))
    threads = [threading.Thread(target=one, daemon=True) for one in (server.run, engine.run)]
    for thread in threads:
        thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    engine.stop()
    server.should_exit = True
    for thread in threads:
        thread.join(20)


def test_a_server_completes_the_prompts_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's completions are of the trainer's weights; those of the second are a step late."""
    loaded: list[str] = []
    monkeypatch.setenv("SERVER_KEY", "k")
    with serving(tmp_path, loaded.append, "k") as address:
        served = {"data.completions": "served", "data.server.addresses": [address]}
        run = tiny_run(in_fp64({**TINY, **served, "data.server.key_variable": "SERVER_KEY"}))
        parts, found = build(run), []
        for step in (1, 2):
            run.step = step
            parts.stepper.forward_backward(parts.train_loader.take(4), step)
            result = parts.stepper.update(0.02, 0.0)
            found.append(float(result.statistics["sampling/logp_difference"]))
            figures = run.hooks.each("step_figures", run=run, record={"step": step})
            (own,) = [one for _, one in figures if "reward" in one]
            assert own["rollout_lag"] == step - 1
            assert 0 < own["completions/mean_length"] <= 7
        assert found[0] < 1e-12
        assert found[1] > 1e-4
        folder = tmp_path / "step_00000002"
        folder.mkdir()
        client = Client(ServerConfig(addresses=[address], key_variable="SERVER_KEY"))
        client.load(folder)
        assert loaded == [str(folder.resolve())]
        with pytest.raises(RunError, match="from which this server loads weights"):
            client.load(tmp_path.parent)


def test_a_model_without_a_published_form_is_refused_before_launch() -> None:
    server = {"data.server.addresses": ["http://127.0.0.1:1"], "data.server.weights": "checkpoints"}
    with pytest.raises(UsageError, match=r"weights=checkpoints exports .* refuses this run: .* no published form"):
        tiny_run({**TINY, "data.completions": "served", **server})


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "cp2", "fsdp2", "zero2"])
def test_a_layout_computes_what_one_process_does_with_the_completions_of_a_server(layout: str, tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        served = {"data.completions": "served", "data.server.addresses": [address], "trainer.eval_samples": 2}
        loss = {"objectives.grpo.loss": "cispo", "objectives.grpo.epsilon_high": 5.0}
        require_parity({**TINY, **served, **loss, "optimizer.lr": 0.02}, layout)
