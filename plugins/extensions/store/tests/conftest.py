"""A server of S3 on this machine with the bucket 'bucket', and the user that it accepts."""

from collections.abc import Iterator
from pathlib import Path

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
