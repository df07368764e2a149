"""Why we lose where we lose: what a profiler showed, said once here and quoted by every report."""

from __future__ import annotations

_UNKNOWN = "Not looked into yet."

_LIMITS = {
    "append lists, keyed, lz4": (
        "Checking types and encoding take 50 us a batch of 1,024 records; the limit, which writes what is encoded"
        " already, moves with the page cache."
    ),
    "append lists, keyed, uncompressed": (
        "Appending touches each value and key twice, to check its type and to encode it: as long as the page cache"
        " takes to swallow the batch uncompressed."
    ),
    "producer.send, one at a time": "Half a microsecond a call before anything is encoded.",
    "segmentlog produce FILE": "0.2 s of it are the start of Python and numpy.",
    "segmentlog consume --values": "0.2 s of it are the start of Python and numpy.",
    "append one record, durable": "Some 20 us of Python, and as much again with caches that went cold in the fsync.",
    "32 threads, durable, against one": (
        "One interpreter: each thread pays some 30 us for its own call and for being woken, however few fsyncs there"
        " are."
    ),
    "segmentlog tail": "Half of it is the start of Python and numpy; the rest imports.",
}

_ONE_RECORD = (
    "A call is a batch of its own, with header, checksum, locks and the shared page: some 16 us of Python."
    " `Producer.send` gathers records into batches, at about a microsecond each."
)
_BARE_FILE = "A bare file has no checksum, no compression, no index, and one writer at a time that may trust it."
_OPENING = (
    "Opening a store reads its settings and the topic's, looks at what kind of mount it is on, maps the state page and"
    " starts a thread: some 20 system calls and 0.9 ms, most of them Python that runs for the first time."
)

# (work, synced, system) with "" for any; the first that fits is quoted.
_PEERS: dict[tuple[str, str, str], str] = {
    ("append in batches", "", "plain file"): _BARE_FILE,
    ("append in batches", "", ""): (
        "Uncompressed, a batch is as much for the page cache as for us, and rounds differ with its writeback."
    ),
    ("append in batches, p99.9", "", ""): (
        "A thousandth of all calls is a handful in a round: the kernel's writeback, which more throughput meets more"
        " often."
    ),
    ("append singly", "", "Kafka"): "Its client gathers calls into batches in the background, as our `Producer` does.",
    ("append singly", "", ""): _ONE_RECORD,
    ("append singly, p99", "", ""): _ONE_RECORD,
    ("16 threads", "batch", "plain file"): (
        "Each thread does nothing but `write` and `fdatasync`, and the file system joins the fsyncs; ours pays for a"
        " batch header, a checksum and two locks, under one interpreter."
    ),
    ("scan values", "", "plain file"): _BARE_FILE,
    ("scan values", "", "LMDB"): (
        "LMDB hands out copies of mapped memory; ours checks a checksum, decompresses (a third of the time) and"
        " decodes. Without LZ4 it is ahead."
    ),
    ("scan values", "", "Kafka's log engine"): "A JVM walks buffers, where Python makes an object of each value.",
    ("scan records", "", "Kafka's log engine"): "A JVM's views of a buffer cost less than Python's objects.",
    ("read at a random offset", "", ""): (
        "A batch is the unit of reading: 1,024 records are decompressed (50 us) and decoded (40 us) for one. Write"
        " smaller batches where single records are read; `Table` keeps what it has decompressed."
    ),
    ("memory", "", ""): "Less than a megabyte either way.",
    ("open after kill -9", "", ""): _OPENING,
    ("compaction", "", "NATS JetStream"): (
        "JetStream holds the last message of each subject in memory while it appends, and a limit of one message a"
        " subject only marks the older ones as deleted. Its appends pay for that index: see the first row."
    ),
    ("disk for the same records", "", "RocksDB"): "It compresses again, in larger blocks, what it merges.",
}

# By the name of a row, or what it begins with.
_SERVER: dict[str, str] = {
    "produce/java": (
        "A request of Java's is one batch of 16 KiB, 150 records, and costs some 105 us of a core: 30 of them are"
        " the kernel's, 65 Python's (240 calls a request, none a record), the rest checksums and copies. Half of"
        " what Kafka takes would be little more than the kernel's part. As the server takes less than half a core,"
        " the rate is that of the clients, which share the two cores with it."
    ),
    "produce/confluent": (
        "librdkafka's requests are several times as large as Java's, and most of their cost is the kernel's"
        " copies, which are the same for both. As the server takes less than a third of a core, the rate is that of"
        " the clients, which share the two cores with it."
    ),
    "small/": (
        "A request costs some 30 us of Python, however few records it has; of what is fetched each batch is looked"
        " up and copied by numpy, 20 ns a batch, where Kafka has the kernel send the file as it lies."
    ),
    "latency": (
        "Nearly all of it is Python that has slept for two milliseconds: some 60 us to take a request apart, as"
        " much to append, 100 to see what has come and to read it, 20 for the answer. The producer is answered"
        " first, as by Kafka."
    ),
    "consume": (
        "The server has one core. `sendmsg` copies what goes out, 220 to 250 us a MiB, and Python adds 85: twice"
        " as many consumers do not make that less. Kafka has the kernel send the file (`sendfile`), which copies"
        " nothing on that core. For us that was slower, 350 to 430 us a MiB: our headers lie between the batches."
    ),
    "partitions": (
        "A partition is one worker's, and a worker is one interpreter, so that a single partition has one core at"
        " most. Of the memory most is the log, which is mapped to be read: the kernel takes it back when somebody"
        " needs it."
    ),
    "connections": (
        "All of four partitions' requests are two interpreters' work; a large one is a copy, a CRC32C and our own hash."
    ),
}


def reason_for(bench: str, *what: str) -> str:
    """Return a sentence with the reason, or one that says that it is unknown."""
    if bench == "limits":
        return _LIMITS.get(what[0], _UNKNOWN)
    if bench == "server":
        return next((reason for name, reason in _SERVER.items() if what[0].startswith(name)), _UNKNOWN)
    workload, sync, system = what
    for key in ((workload, sync, system), (workload, "", system), (workload, sync, ""), (workload, "", "")):
        if key in _PEERS:
            return _PEERS[key]
    return _UNKNOWN
