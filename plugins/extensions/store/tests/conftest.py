"""A run's folder, a store in memory, and a server of S3 on this machine with the bucket 'bucket' and its user."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """The address of the server."""
    pytest.importorskip("s3fs", reason="the tests of S3 need s3fs")
    server_of = pytest.importorskip("moto.server", reason="the tests of S3 need moto")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The bucket, for this process and those that it starts. Copies of the cache are in the test's folder."""
    import s3fs

    variables = {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "key", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("MPLUG_CACHE", str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    if not files.exists("bucket"):
        files.mkdir("bucket")
    yield "s3://bucket"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that is writing the second line of its metrics."""
    directory = tmp_path / "runs" / "first"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text("trainer: {steps: 9}\n")
    (directory / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """A `Store` for copies of the run, empty."""
    from mplug_store.address import Store

    return Store(f"memory://{tmp_path.name}-{id(tmp_path)}/first")
