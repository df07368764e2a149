"""``segmentlog http`` and ``serve --http`` as programs: where they listen, what ends them, what they refuse."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cli.processes import arguments_of
from waiting import wait_until

import segmentlog
from segmentlog.http.serving import HttpServer


@contextmanager
def _started(store: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the program; the process and the address of its pages. At the end the process is killed if it still runs.

    Without that, a failed assertion would wait in `Popen.__exit__` for a server that does not end.
    """
    with subprocess.Popen(arguments_of(store, *arguments), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://[^) \n]+", process.stderr.readline())
            assert found
            yield process, found[0]
        finally:
            process.kill()


def _end(process: subprocess.Popen[str], number: int) -> str:
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    return said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_http_answers_until_it_is_told_to_stop(tmp_path: Path, number: int) -> None:
    """It creates the store if there is none."""
    with _started(tmp_path / "store", "http", "--listen", "127.0.0.1:0") as (process, url):
        assert httpx.get(f"{url}/healthz").text == "ok\n"
        assert _end(process, number) == "stopped\n"
    assert (tmp_path / "store" / "store.json").exists()


def test_a_failed_assertion_ends_the_server(tmp_path: Path) -> None:
    """The helper of these tests kills the process, and the failure is reported."""
    with (
        pytest.raises(AssertionError, match="of a test"),
        _started(tmp_path / "store", "http", "--listen", "127.0.0.1:0") as (process, _),
    ):
        raise AssertionError("of a test")
    assert process.returncode == -signal.SIGKILL


def test_what_is_asked_for_in_vain(tmp_path: Path) -> None:
    """A sentence that says what to do, and no traceback."""
    for arguments, code, said in (
        (("http", "--listen", "0.0.0.0:0"), 1, "--tls-cert"),
        (("http", "--listen", "nonsense"), 1, "HOST:PORT"),
        (("serve", "--listen", "127.0.0.1:0", "--allow-writes"), 2, "--http"),
        (("serve", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0"), 1, "--tls-cert"),
    ):
        done = subprocess.run(arguments_of(tmp_path / "store", *arguments), capture_output=True, text=True, timeout=60)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr


def test_serve_looks_after_the_http_door(tmp_path: Path) -> None:
    """The supervisor restarts a killed HTTP process, and stops it when it ends itself."""
    arguments = (
        "serve", "--listen", "127.0.0.1:0", "--workers", "1", "--http", "127.0.0.1:0",
        "--allowed-host", "logs.example", "--advertise", "kafka.example:9092",
    )  # fmt: skip
    with _started(tmp_path / "store", *arguments) as (process, url):
        assert httpx.get(f"{url}/healthz").text == "ok\n"
        for name, status in (("logs.example", 200), ("kafka.example", 200), ("other.example", 421)):
            assert httpx.get(f"{url}/topics", headers={"host": name}).status_code == status, name
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[-1]), signal.SIGKILL)
        _until_answered(url)
        process.kill()
        process.wait(30)
        wait_until(lambda: not _is_there(url))


def _is_there(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def _until_answered(url: str) -> None:
    wait_until(lambda: _is_there(url))


def test_a_server_in_a_program_has_both_doors(tmp_path: Path) -> None:
    """``segmentlog.serve(http=...)`` serves both; they close together."""
    with segmentlog.serve(tmp_path / "store", port=0, http="127.0.0.1:0") as server:
        assert server.http_url is not None
        assert httpx.get(f"{server.http_url}/healthz").text == "ok\n"
    assert not _is_there(server.http_url)


def test_a_forked_child_does_not_keep_the_port(tmp_path: Path) -> None:
    """The parent answers requests; after it has closed the port, no process does."""
    with (
        segmentlog.open(tmp_path / "store") as store,
        HttpServer(store, "127.0.0.1", 0) as server,
        httpx.Client(base_url=server.url) as web,
    ):
        assert web.get("/healthz").text == "ok\n"
        read_fd, write_fd = os.pipe()
        born_fd, told_fd = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(write_fd)
            os.write(told_fd, b"!")
            os.read(read_fd, 1)  # lives until the parent has checked
            os._exit(0)
        os.read(born_fd, 1)  # the child has had time to close what it inherited
        for fd in (read_fd, born_fd, told_fd):
            os.close(fd)
        try:
            assert web.get("/healthz").text == "ok\n"
            server.close()
            assert not _is_there(server.url)
        finally:
            os.close(write_fd)
            os.waitpid(pid, 0)
