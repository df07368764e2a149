"""Kafka's log in Redis as kafkaesque (2015) designed it, written anew to measure and to crash beside ours.

    {topic}             hash: size (records a page), max (pages kept), ttl (seconds a closed page is kept)
    {topic}/pages       sorted set: page numbers, scored by their first offset
    {topic}/pages/{n}   list: the records of page n

Push and pull are one Lua script each, and so atomic. Run ``python -m bench.kafkaesque`` to see
what a power cut does to it: the table that ``segmentlog demo durability`` shows of segmentlog.

Needs redis-server and the package redis.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from segmentlog.testing.offset_reuse import ReceivedRecord, ScenarioOutcome, play
from segmentlog.testing.ports import free_ports

Fsync = Literal["always", "everysec", "no"]
POLICIES: tuple[Fsync, ...] = ("always", "everysec", "no")

_START_S = 20.0

# KEYS: topic. ARGV: the records. Returns the offset of the first, or nil when there is no such topic.
#
# A page is closed when the next one is opened, not when its last record comes: the newest page then
# never expires, and with it the end of the log is never forgotten.
_PUSH = """
local topic, pages = KEYS[1], KEYS[1] .. '/pages'
local config = redis.call('HMGET', topic, 'size', 'max', 'ttl')
if not config[1] then return nil end
local size, max, ttl = tonumber(config[1]), tonumber(config[2]), tonumber(config[3])

local function key(page) return string.format('%s/%.0f', pages, page) end
local function open(page, first)
    redis.call('ZADD', pages, string.format('%.0f', first), string.format('%.0f', page))
end
local function close(page)
    if ttl then redis.call('EXPIRE', key(page), ttl) end
    if max then redis.call('DEL', key(page - max)) end
end

local last = redis.call('ZREVRANGE', pages, 0, 0, 'WITHSCORES')
local page, first, used = 0, 0, 0
if last[1] then
    page, first = tonumber(last[1]), tonumber(last[2])
    used = redis.call('LLEN', key(page))
else
    open(page, first)
end
local base, at = first + used, 1
while at <= #ARGV do
    if used == size then
        close(page)
        page, first, used = page + 1, first + size, 0
        open(page, first)
    end
    -- unpack puts all of them on Lua's stack, which takes no more than some thousands
    local count = math.min(size - used, #ARGV - at + 1, 1000)
    redis.call('RPUSH', key(page), unpack(ARGV, at, at + count - 1))
    used, at = used + count, at + count
end
return base
"""

# KEYS: topic. ARGV: offset, limit. Returns offset, record, offset, record, ...; skips pages that are gone.
_PULL = """
local pages, offset, limit = KEYS[1] .. '/pages', tonumber(ARGV[1]), tonumber(ARGV[2])
local found = redis.call('ZREVRANGEBYSCORE', pages, ARGV[1], '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
if not found[1] then found = redis.call('ZRANGE', pages, 0, 0, 'WITHSCORES') end
local result = {}
while found[1] and limit > 0 do
    local first = tonumber(found[2])
    local from = math.max(offset - first, 0)
    local records = redis.call('LRANGE', pages .. '/' .. found[1], from, from + limit - 1)
    for index, record in ipairs(records) do
        result[#result + 1] = first + from + index - 1
        result[#result + 1] = record
    end
    limit = limit - #records
    found = redis.call('ZRANGEBYSCORE', pages, '(' .. found[2], '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
end
return result
"""


class RedisUnavailable(RuntimeError):
    """redis-server or the package redis is not there; says how to get it."""


class RedisServer:
    """A redis-server of its own, with an append-only file and nothing else, that can be killed and set back.

        with RedisServer("everysec") as server:
            server.client().set("a", "1")
            server.mark_synced()            # an fsync happens here
            server.client().set("b", "2")   # acknowledged, and no fsync yet
            server.kill()
            server.cut_back_to_last_fsync()
            server.restart()                # a is there, b is not

    **What is simulated, and why it is a power cut.** Killing the process loses nothing that it
    wrote: the page cache goes on living. A power cut also takes what was written and not fsynced.
    The append-only file is only ever appended to, so what a power cut may leave of it is its
    synced length or more; `cut_back_to_last_fsync` leaves exactly that. With ``always`` Redis
    fsyncs before it answers, so nothing that it acknowledged can go, and nothing is cut. With
    ``everysec`` it answers after write(), and a background thread fsyncs up to a second (when the
    disk is busy two) later; with ``no`` the kernel does, some 30 seconds later. In either case
    there is a time in which what was acknowledged is not on the disk, and the power may fail
    in it: ``strace -f -tt -e trace=fdatasync,write redis-server --appendfsync everysec ...`` shows
    answers that are half a second older than the fdatasync that covers them. So as not to depend
    on hitting that time, the last fsync is one that is made here, by `mark_synced`: the state
    after the cut is that of a machine that died after Redis answered and before its next fsync
    was done, whether or not Redis happened to have fsynced once more.
    """

    def __init__(
        self, fsync: Fsync, *, folder: str | os.PathLike[str] | None = None, socket_path: str | None = None
    ) -> None:
        """``socket_path``: listen there, on a UNIX socket, and on no port. Such a path has 107 bytes at most."""
        self.fsync = fsync
        self._given_folder = folder
        self._socket_path = socket_path
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None
        self._synced: tuple[str, int] | None = None
        self.folder = Path()
        self.port = 0

    @property
    def url(self) -> str:
        """What redis.Redis.from_url and ``segmentlog import`` take."""
        if self._socket_path is not None:
            return f"unix://{self._socket_path}?db=0"
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> RedisServer:
        check_available()
        if self._given_folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="segmentlog-redis-")
            self.folder = Path(self._temporary.name)
        else:
            self.folder = Path(self._given_folder)
        try:
            self.restart()
            self.mark_synced()  # what Redis makes when it starts is no part of any experiment
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    def client(self) -> Any:
        """Return a client of the package redis, connected. Another one after a `restart`."""
        return self._client

    def server_id(self) -> int | None:
        """Return the process id of the server, or None while it does not run."""
        return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """SIGKILL the server, and wait until it is gone."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Start the server on what is in its folder; on a free port, which may be another one than before."""
        self.kill()
        for _ in range(5):  # between choosing a port and taking it, somebody else may
            self.port = 0 if self._socket_path is not None else free_ports()
            if self._started():
                return
        log = (self.folder / "redis.log").read_text(errors="replace")
        raise RuntimeError(f"redis-server does not start in {self.folder}; the end of its log: {log[-2000:]}")

    def _started(self) -> bool:
        import redis

        options = {
            "port": self.port, "bind": "127.0.0.1", "dir": self.folder, "save": "", "appendonly": "yes",
            "appendfsync": self.fsync, "auto-aof-rewrite-percentage": 0, "aof-load-truncated": "yes",
        }  # fmt: skip
        if self._socket_path is not None:
            options["unixsocket"] = self._socket_path
        command = ["redis-server", *(part for key, value in options.items() for part in (f"--{key}", str(value)))]
        with open(self.folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url, socket_timeout=30)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                # The process id: or another server might be the one that answers on this port.
                if client.info("server")["process_id"] == self._process.pid:
                    _wait_loaded(client)
                    self._client = client
                    return True
            except redis.RedisError:  # not listening yet, or still loading
                pass
            time.sleep(0.01)
        client.close()
        self.kill()
        return False

    # ------------------------------------------------------------ the append-only file

    def append_only_file(self) -> Path:
        """Return the file that Redis appends to now."""
        folder = self.folder / "appendonlydir"
        if not folder.is_dir():  # before Redis 7 it was one file
            return self.folder / "appendonly.aof"
        manifest = (folder / "appendonly.aof.manifest").read_text()
        # file appendonly.aof.1.incr.aof seq 1 type i
        names = [line.split()[1] for line in manifest.splitlines() if line.split()[-1] == "i"]
        return folder / names[-1]

    def wait_written(self) -> None:
        """Wait until all that was acknowledged is in the file, if only in the page cache.

        With ``everysec`` Redis may hold it back in memory for up to two seconds while an fsync is
        under way, and has acknowledged it all the same: a SIGKILL then takes it.
        """
        deadline = time.monotonic() + _START_S
        while self._client.info("persistence")["aof_buffer_length"]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"redis-server has not written its log for {_START_S} s; look at {self.folder}")
            time.sleep(0.005)

    def mark_synced(self) -> None:
        """Do what an fsync by Redis at this moment would: fsync its file, and remember how long it is."""
        self.wait_written()
        path = self.append_only_file()
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            self._synced = (path.name, os.fstat(file.fileno()).st_size)

    def cut_back_to_last_fsync(self) -> int:
        """Remove the bytes that a power cut would take, and return their number. The server must have been killed."""
        if self._process is not None:
            raise RuntimeError("kill the server first: a machine does not die with its processes running")
        path = self.append_only_file()
        if self._synced is None or self._synced[0] != path.name:
            raise RuntimeError(f"{path}: Redis has begun another file since `mark_synced`; call it again")
        length = path.stat().st_size
        if self.fsync == "always":
            return 0
        os.truncate(path, self._synced[1])
        return length - self._synced[1]


def check_available() -> None:
    """Raise `RedisUnavailable` unless a server can be started and talked to."""
    if shutil.which("redis-server") is None:
        raise RedisUnavailable("redis-server is not installed: apt-get install redis-server")
    try:
        import redis  # noqa: F401
    except ImportError:
        wanted = "the package redis is not installed: pip install '.[redis]' in a clone of segmentlog"
        raise RedisUnavailable(wanted) from None


def _wait_loaded(client: Any) -> None:
    """Wait until Redis has loaded its file. Until then it answers INFO, but nothing else."""
    while client.info("persistence")["loading"]:
        time.sleep(0.01)


class KafkaesqueTopic:
    """A topic in Redis. ``client`` is a redis.Redis that returns bytes."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self.name = name
        self._push = client.register_script(_PUSH)
        self._pull = client.register_script(_PULL)

    def create(self, size: int = 65536, max_pages: int | None = None, ttl_s: int | None = None) -> KafkaesqueTopic:
        """Make it: pages of ``size`` records, ``max_pages`` closed ones kept (None: all), each for ``ttl_s``."""
        if size < 1:
            raise ValueError(f"size = {size}: a page holds one record or more")
        settings = {"size": size, "max": max_pages or "", "ttl": ttl_s or ""}
        # size alone decides who made it: of two that try at once, one does.
        if not self._client.hsetnx(self.name, "size", size):
            raise ValueError(f"topic {self.name!r} exists already; choose another name, or delete its keys")
        self._client.hset(self.name, mapping=settings)
        return self

    def push(self, values: list[bytes]) -> int:
        """Append the records, all at once; the offset of the first."""
        base_offset = self._push(keys=[self.name], args=values)
        if base_offset is None:
            raise KeyError(f"there is no topic {self.name!r}; create it first")
        return int(base_offset)

    def pull(self, offset: int = 0, limit: int = 1024) -> list[ReceivedRecord]:
        """At most ``limit`` records from ``offset`` on, each with its offset; of pages that are gone, nothing."""
        found = self._pull(keys=[self.name], args=[offset, limit])
        return list(zip(map(int, found[::2]), found[1::2], strict=True))

    def __len__(self) -> int:
        """Return the offset after the last record, which is the number of all pushed records."""
        last = self._client.zrevrange(f"{self.name}/pages", 0, 0, withscores=True)
        if not last:
            return 0
        page, first = last[0]
        return int(first) + int(self._client.llen(f"{self.name}/pages/{page.decode()}"))


class RedisLog:
    """Such a topic as the scenario wants it: `segmentlog.testing.offset_reuse.CrashableLog`. Use it in a ``with``.

    ``power_cut=False``: only the server is killed, and the machine lives on.
    """

    reads_durable = False

    def __init__(self, fsync: Fsync, *, power_cut: bool = True) -> None:
        self.policy = fsync
        self.name = f"Redis, appendfsync={fsync}" + ("" if power_cut else ", server killed")
        self._power_cut = power_cut
        # A process's death takes nothing that was written, and `crash` waits until all of it is.
        self.acks_durably = fsync == "always" or not power_cut
        self._server = RedisServer(fsync)

    def append(self, values: list[bytes]) -> int:
        return self._topic.push(values)

    def sync(self) -> None:
        self._server.mark_synced()

    def crash(self) -> None:
        self._server.wait_written()
        self._server.kill()
        if self._power_cut:
            self._server.cut_back_to_last_fsync()
        self._server.restart()
        self._topic = KafkaesqueTopic(self._server.client(), "t")

    def read(self, from_offset: int) -> list[ReceivedRecord]:
        entries: list[ReceivedRecord] = []
        while more := self._topic.pull(from_offset):
            entries += more
            from_offset = more[-1][0] + 1
        return entries

    def lost_ranges(self) -> list[tuple[int, int]]:
        """None: it does not know that anything was lost."""
        return []

    def __enter__(self) -> RedisLog:
        self._server.__enter__()
        self._topic = KafkaesqueTopic(self._server.client(), "t").create(size=4)
        self._server.mark_synced()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.__exit__()


def play_redis() -> list[ScenarioOutcome]:
    """Return the scenario under each policy of Redis."""
    outcomes = []
    for policy in POLICIES:
        with RedisLog(policy) as log:
            outcomes.append(play(log))
    return outcomes


def main() -> int:
    """Print what a power cut does to the log in Redis, as ``segmentlog demo durability`` does for segmentlog."""
    from segmentlog.cli.demo_command import show_outcomes  # not above: the command line loads this module

    try:
        outcomes = play_redis()
    except RedisUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show_outcomes(outcomes, "kafkaesque's log in Redis, with a power cut after gamma")
    return 0


if __name__ == "__main__":
    sys.exit(main())
