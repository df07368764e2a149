"""Check the guarantees of shipping against the events of machines that ship, restore and take over a store.

Every machine records its actions, and the object store records its changes, in one order. The check uses only these
events.

    ["owns", machine, epoch]                                it is bound as the owner of that epoch
    ["held", machine, place, base, [digest, ...]]           segment files as they were, up to the end of each batch
    ["appended", machine, place, [[offset, record], ...]]
    ["read", who, place, [[offset, record], ...]]
    ["shipped", machine, place, offset, durable]            according to its state page, and the durable offset
    ["gives up", machine, place, how, from, to]             about to "trim" or to "truncate"
    ["deletes", machine, topic]
    ["fenced", machine]                                     it got the error
    ["ends", machine, number, verdict, [[place, offset], ...], place]    a transaction, and where it commits a position
    ["commits", machine, place, offset]                     a position outside of transactions, before a durable record
    ["put", who, key, digest], ["deleted", who, ms, [key, ...]]
    ["manifest", who, ms, nonce, epoch, {place: entry}, [key, ...], {key: condemned since},
                                                            is handed over]
    ["restores", label], ["refused", label, why]
    ["restored", label, nonce, {place: {base: [size, digest]}}]          the restored files
    ["found", label, how, {place: content}, [[place, offset, number], ...]]   how: "restore", "takeover" or "restart"
    ["followed", who, nonce, {place: {base: [size, digest]}}, {place: content}, positions]    "": it failed half way
    ["set aside", machine, {place: [from, [[offset, record], ...]]}]    records of its folder that were not shipped
    ["error", who, text]                                    a failure that must not happen

A place is "<topic id>/<partition>", a record "<number>/<key>", with "@<timestamp>" where it was read. An entry of a
manifest has "start", "end", "ceiling" and "segments" (as restored); contents have "start", "end", "batches", "records",
"visible" (to ``read_committed``) and "lost". Positions have the number of their transaction, or 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

Event = list[Any]
Place = str
Spot = tuple[Place, int]
"""Place and offset."""


class Transaction(msgspec.Struct):
    """One that a producer ended, or tried to."""

    machine: str
    verdict: str
    """Committed, aborted or unknown."""
    spots: list[Spot]
    position: Place


class Machine(msgspec.Struct):
    """A store that ships, or shipped."""

    epoch: int = 0
    is_fenced: bool = False
    content: dict[Place, dict[int, str]] = {}
    """Records in its logs, by offset."""
    resumed: dict[Place, int] = {}
    """Offsets at which its logs resumed when it took over."""
    shipped: dict[Place, int] = {}


class Checker:
    """Goes through a history, once. `wrong` is what contradicts a promise, each with the kind in front."""

    def __init__(self, grace_ms: int, compacted: Iterable[str] = ()) -> None:
        self.wrong: list[str] = []
        self._grace_ms = grace_ms
        self._compacted = set(compacted)
        """Ids of topics whose records may go when newer ones have their key."""
        self._machines: defaultdict[str, Machine] = defaultdict(Machine)
        self._held: defaultdict[tuple[Place, str], set[str]] = defaultdict(set)
        self._unseen: list[tuple[str, Place, str, str]] = []
        self._records: dict[Spot, str] = {}
        self._timestamps: dict[Spot, str] = {}
        self._highest: dict[Place, tuple[int, str]] = {}
        """The highest offset that was ever handed out, and where."""
        self._acknowledged: dict[Spot, None] = {}
        self._given_up: set[Spot] = set()
        self._truncated: set[Place] = set()
        self._deleted_topics: set[str] = set()
        self._transactions: dict[int, Transaction] = {}
        self._committed: dict[Place, int] = {}
        self._objects: dict[str, str] = {}
        self._epoch = 0
        self._manifests: dict[str, dict[Place, dict[str, Any]]] = {}
        """Entries by nonce, in the order in which they took effect."""
        self._needed: set[str] = set()
        self._ever_needed: set[str] = set()
        self._condemned: dict[str, int] = {}
        self._promised: dict[Place, dict[int, int]] = {}
        """Ceilings by the owner's epoch."""
        self._begun: dict[str, tuple[int, int]] = {}
        """By label: how much was acknowledged, how many manifests there were."""
        self._restored: dict[str, dict[Place, dict[str, Any]]] = {}
        self._followed: dict[str, int] = {}
        """By label: the last manifest that was followed."""

    def check(self, events: Iterable[Event]) -> list[str]:
        """Return all violations in a history."""
        for kind, *rest in events:
            self.wrong += getattr(self, f"_on_{kind.replace(' ', '_')}")(*rest) or ()
        for who, place, base, digest in self._unseen:  # it may have been shipped before it was written down
            if digest not in self._held[place, base]:
                self.wrong.append(f"forged: segment {base} of {place}, by {who}: such a file never was anywhere")
        return self.wrong

    # ------------------------------------------------------------ what machines do

    def _on_owns(self, machine: str, epoch: int) -> None:
        self._machines[machine].epoch = epoch

    def _on_held(self, who: str, place: Place, base: int, digests: list[str]) -> None:
        self._held[place, str(base)].update(digests)

    def _on_appended(self, who: str, place: Place, records: list[tuple[int, str]]) -> Iterator[str]:
        machine = self._machines[who]
        content = machine.content.setdefault(place, {})
        promised = max(self._promises(place, machine.epoch), default=None)
        for offset, record in records:
            yield from self._name(who, place, offset, record)
            content[offset] = record
            if offset > self._highest.get(place, (-1, ""))[0]:
                self._highest[place] = (offset, who)
            if promised is not None and offset >= promised:
                yield f"unpromised: {who} handed out offset {offset} of {place}, and {promised} was promised"
            if offset < machine.resumed.get(place, 0):
                yield f"reused: {who} handed out offset {offset} of {place}, which goes on at {machine.resumed[place]}"
        if machine.is_fenced and place in self._promised:
            yield f"unfenced: {who} appended to {place} after it was fenced"

    def _promises(self, place: Place, epoch: int) -> list[int]:
        return [ceiling for of, ceiling in self._promised.get(place, {}).items() if of <= epoch]

    def _name(self, who: str, place: Place, offset: int, record: str) -> Iterator[str]:
        """Yield each offset that names two records, for any process that appended or read it."""
        name, _, timestamp = record.partition("@")
        for what, known in ((name, self._records), (timestamp, self._timestamps)):
            before = known.setdefault((place, offset), what) if what else what
            if before != what:
                yield f"two records: {who} has {what} at offset {offset} of {place}, where others have {before}"

    def _on_read(self, who: str, place: Place, records: list[tuple[int, str]]) -> Iterator[str]:
        for offset, record in records:
            if (place, offset) not in self._records:
                yield f"invented: {who} read {record} at offset {offset} of {place}, which nobody was given"
            yield from self._name(who, place, offset, record)

    def _on_shipped(self, who: str, place: Place, end: int, durable: int) -> Iterator[str]:
        machine = self._machines[who]
        before = machine.shipped.get(place, 0)
        machine.shipped[place] = end
        if end > durable:
            yield f"ahead: {who} says that {place} is shipped up to {end}, and on disk it is up to {durable}"
        if machine.is_fenced and end > before:
            yield f"unfenced: {who} says that {place} is shipped up to {end}, after it was fenced"
        new = [offset for offset in machine.content.get(place, {}) if offset < end]
        self._acknowledged.update(dict.fromkeys((place, offset) for offset in new))
        if self._manifests:
            yield from self._covered(place, new, f"{who} says that it is shipped, and the manifest does not have it")
        elif new:
            yield f"lost: {who} says that {place} is shipped up to {end}, and nothing ever was"

    def _covered(self, place: Place, offsets: Iterable[int], why: str) -> Iterator[str]:
        """Yield each acknowledged record that the current manifest lacks."""
        if place.partition("/")[0] in self._deleted_topics:
            return
        entry = list(self._manifests.values())[-1].get(place)
        for offset in offsets:
            is_there = entry is not None and entry["start"] <= offset < entry["end"]
            if not is_there and (place, offset) not in self._given_up:
                yield f"lost: offset {offset} of {place}: {why}"

    def _is_owner(self, who: str) -> bool:
        return self._machines[who].epoch >= self._epoch

    def _on_gives_up(self, who: str, place: Place, how: str, start: int, end: int) -> None:
        content = self._machines[who].content.get(place, {})
        for offset in [offset for offset in content if start <= offset < end]:
            del content[offset]
        if self._is_owner(who):  # also records that newer ones have replaced
            self._given_up.update(spot for spot in self._records if spot[0] == place and start <= spot[1] < end)
            if how == "truncate":
                self._truncated.add(place)

    def _on_set_aside(self, who: str, contents: dict[Place, tuple[int, list[tuple[int, str]]]]) -> Iterator[str]:
        """Check that the folder of a former owner still has what was never shipped."""
        machine = self._machines[who]
        if not machine.is_fenced:
            yield f"unfenced: {who} was set aside, and its processes could still append"
        for place, content in machine.content.items():
            if place.partition("/")[0] in self._compacted:
                continue
            start, records = contents.get(place, (0, []))
            shipped, found = max(machine.shipped.get(place, 0), start), dict(records)
            for offset, record in content.items():
                if offset >= shipped and found.get(offset) != record:
                    yield f"set aside: {record} at offset {offset} of {place} is not in the folder of {who}"

    def _on_deletes(self, who: str, topic: str) -> None:
        for place in [place for place in self._machines[who].content if place.startswith(f"{topic}/")]:
            del self._machines[who].content[place]
        if self._is_owner(who):
            self._deleted_topics.add(topic)

    def _on_fenced(self, who: str) -> Iterator[str]:
        if self._is_owner(who):
            yield f"fenced: {who} was told so, and nobody has taken over"
        self._machines[who].is_fenced = True

    def _on_ends(self, who: str, number: int, verdict: str, spots: list[list[Any]], position: Place) -> None:
        self._transactions[number] = Transaction(who, verdict, [(place, offset) for place, offset in spots], position)

    def _on_commits(self, who: str, place: Place, offset: int) -> None:
        self._committed[place] = offset

    def _on_error(self, who: str, text: str) -> Iterator[str]:
        yield f"error: {who}: {text}"

    # ------------------------------------------------------------ what the object store has

    def _on_put(self, who: str, key: str, digest: str) -> Iterator[str]:
        if self._objects.setdefault(key, digest) != digest:
            yield f"rewritten: {who} put something else as {key}"

    def _on_deleted(self, who: str, now_ms: int, keys: list[str]) -> Iterator[str]:
        for key in keys:
            self._objects.pop(key, None)
            if key in self._needed:
                yield f"needed: {who} deleted {key}, which the manifest refers to"
            elif key in self._ever_needed and now_ms - self._condemned.get(key, now_ms) < self._grace_ms:
                yield f"hasty: {who} deleted {key}, which was not condemned {self._grace_ms} ms ago"

    def _on_manifest(
        self, who: str, now_ms: int, nonce: str, epoch: int, entries: dict[Place, dict[str, Any]], keys: list[str],
        condemned: dict[str, int], is_handed_over: bool,
    ) -> Iterator[str]:  # fmt: skip
        if epoch < self._epoch:
            yield f"two owners: {who} put a manifest of epoch {epoch}, and {self._epoch} owns it"
        self._epoch = epoch
        self._machines[who].epoch = max(epoch, self._machines[who].epoch)
        self._manifests[nonce] = entries
        self._needed = set(keys)
        self._ever_needed.update(keys)
        self._condemned.update(condemned)
        for key in keys:
            if key not in self._objects:
                yield f"dangling: the manifest that {who} put refers to {key}, which is not there"
        for place, entry in entries.items():
            promised = self._promised.setdefault(place, {})
            promised[epoch] = max(entry["ceiling"], 0 if is_handed_over else promised.get(epoch, 0))
            highest, whose = self._highest.get(place, (-1, ""))
            if highest >= entry["ceiling"]:
                yield f"unpromised: {whose} handed out offset {highest} of {place}, and {entry['ceiling']} is promised"
            for base, (size_bytes, digest) in entry["segments"].items():
                if size_bytes and digest not in self._held[place, base]:
                    self._unseen.append((who, place, base, digest))
        if is_handed_over:
            yield from self._handed_over(who, entries)
        covered: defaultdict[Place, list[int]] = defaultdict(list)
        for place, offset in self._acknowledged:
            covered[place].append(offset)
        for place, offsets in covered.items():
            yield from self._covered(place, offsets, f"it was shipped, and the manifest that {who} put has it no more")

    def _handed_over(self, who: str, entries: dict[Place, dict[str, Any]]) -> Iterator[str]:
        """Note that all records of the owner are in the object store, so that the next owner must have them."""
        for place, entry in entries.items():
            if entry["ceiling"] != entry["end"]:
                yield f"gap: {who} hands over {place} up to {entry['end']}, and promises {entry['ceiling']}"
        content = self._machines[who].content
        self._acknowledged.update(dict.fromkeys((place, offset) for place in content for offset in content[place]))

    # ------------------------------------------------------------ what a restore brings

    def _on_restores(self, label: str) -> None:
        self._begun[label] = (len(self._acknowledged), len(self._manifests))

    def _on_refused(self, label: str, why: str) -> Iterator[str]:
        if self._begun[label][1]:
            yield f"refused: {label}: {why}"

    def _on_restored(self, label: str, nonce: str, files: dict[Place, dict[str, Any]]) -> Iterator[str]:
        entries = self._manifests.get(nonce)
        if entries is None:
            yield f"bytes: {label} is of a manifest that never was there"
            return
        if label in self._begun and list(self._manifests).index(nonce) < self._begun[label][1] - 1:
            yield f"stale: {label} is of a manifest that was replaced before it began"
        self._restored[label] = entries
        for place, entry in entries.items():
            found = {base: tuple(one) for base, one in files.get(place, {}).items()}
            wanted = {base: tuple(one) for base, one in entry["segments"].items()}
            if found != wanted:
                yield f"bytes: {place} of {label} has {found}, and {wanted} was shipped"

    def _on_found(
        self, label: str, how: str, contents: dict[Place, dict[str, Any]], positions: list[tuple[Place, int, int]]
    ) -> Iterator[str]:
        machine = self._machines[label]
        for place, content in contents.items():
            records = {offset: record for offset, record in content["records"]}
            yield from self._on_read(label, place, content["records"])
            yield from self._gaps(label, place, content)
            if how != "restore":
                machine.content[place] = {offset: record.partition("@")[0] for offset, record in records.items()}
            entry = self._restored.get(label, {}).get(place)
            if how != "restart" and entry is not None:
                machine.resumed[place] = content["end"]
                reused = [base for base, _ in content["batches"] if entry["end"] <= base < entry["ceiling"]]
                if how == "takeover" and content["end"] > entry["ceiling"]:
                    yield f"gap: {place} of {label} at {content['end']}, and only {entry['ceiling']} was promised"
                if reused or content["end"] < entry["ceiling"]:
                    at = min([*reused, content["end"]])
                    yield f"resumed: {place} of {label} at {at}, and offsets below {entry['ceiling']} are taken"
        if how == "restart":
            return
        yield from self._missing(label, contents)
        if how == "takeover":  # a restore decides the undecided transactions once more offsets are reserved
            return
        visible = {(place, offset) for place, content in contents.items() for offset in content["visible"]}
        yield from self._torn(label, contents, visible)
        yield from self._positions(label, positions, visible)

    def _on_followed(
        self, who: str, nonce: str, files: dict[Place, dict[str, Any]], contents: dict[Place, dict[str, Any]],
        positions: list[tuple[Place, int, int]],
    ) -> Iterator[str]:  # fmt: skip
        """Yield each shown record that was not shipped, or not committed."""
        aborted = {
            spot
            for one in self._transactions.values()
            if one.verdict == "aborted" and not any(place in self._truncated for place, _ in one.spots)
            for spot in one.spots
        }
        for place, content in contents.items():
            yield from self._on_read(who, place, content["records"])
            for offset in content["visible"]:
                if (place, offset) in aborted:
                    yield f"aborted: {who} shows offset {offset} of {place}"
        for place, offset, number in positions:
            if not number and place in contents and place not in self._truncated and offset > contents[place]["end"]:
                yield f"position: {who} goes on at {offset} of {place}, which is there up to {contents[place]['end']}"
        if not nonce:
            return
        at = list(self._manifests).index(nonce)
        if at < self._followed.get(who, 0):
            yield f"stale: {who} went back to a manifest that it had left"
        self._followed[who] = at
        for place, entry in self._manifests[nonce].items():
            found = {base: tuple(one) for base, one in files.get(place, {}).items()}
            wanted = {base: tuple(one) for base, one in entry["segments"].items()}
            if found != wanted:
                yield f"bytes: {place} of {who} has {found}, and {wanted} was shipped"
            content = contents.get(place, {})
            if (content.get("start"), content.get("end")) != (entry["start"], entry["end"]):
                yield f"bytes: {place} of {who} is not shown from {entry['start']} to {entry['end']}"

    def _gaps(self, label: str, place: Place, content: dict[str, Any]) -> Iterator[str]:
        """Yield each gap that neither a lost range nor compaction explains."""
        if place.partition("/")[0] in self._compacted:
            return
        reached = content["start"]
        for base, following in [*content["batches"], (content["end"], content["end"])]:
            for lost, end in content["lost"]:
                if lost <= reached < end:
                    reached = end
            if reached < base:
                yield f"unexplained: {place} of {label} has nothing from {reached} to {base - 1}, and nothing says why"
            reached = max(reached, following)

    def _missing(self, label: str, contents: dict[Place, dict[str, Any]]) -> Iterator[str]:
        """Yield each record that was acknowledged before, and is missing."""
        records = {place: dict(content["records"]) for place, content in contents.items()}
        last: dict[tuple[Place, str], int] = {}
        for place, found in records.items():
            for offset, record in found.items():
                last[place, _key(record)] = offset
        for place, offset in list(self._acknowledged)[: self._begun[label][0]]:
            topic = place.partition("/")[0]
            if topic in self._deleted_topics or (place, offset) in self._given_up or offset in records.get(place, {}):
                continue
            record = self._records[place, offset]
            if topic in self._compacted and (last.get((place, _key(record)), -1) > offset or place in self._truncated):
                continue  # a newer one has taken its place; where that was truncated, nothing has
            yield f"lost: {record} at offset {offset} of {place} was shipped, and {label} does not have it"

    def _torn(self, label: str, contents: dict[Place, dict[str, Any]], visible: set[Spot]) -> Iterator[str]:
        """Yield each transaction that is shown in part, or although it was aborted."""
        for number, one in self._transactions.items():
            if any(place in self._truncated for place, _ in one.spots):
                continue
            wanted = {spot for spot in one.spots if self._counts(spot, contents)}
            if one.verdict == "aborted" and wanted & visible:
                yield f"aborted: of transaction {number} {label} shows {sorted(wanted & visible)}"
            elif wanted & visible and wanted - visible:
                yield f"half: of transaction {number} {label} shows not {sorted(wanted - visible)}"

    def _counts(self, spot: Spot, contents: dict[Place, dict[str, Any]]) -> bool:
        if spot in self._given_up or spot[0].partition("/")[0] in self._deleted_topics:
            return False
        return spot[0] not in contents or spot[1] >= contents[spot[0]]["start"]

    def _positions(self, label: str, positions: list[tuple[Place, int, int]], visible: set[Spot]) -> Iterator[str]:
        """Yield each committed offset after the log's end, and each that is older than its transaction."""
        for place, offset, number in positions:
            entry = self._restored.get(label, {}).get(place)
            if place in self._truncated or entry is None:
                continue
            if not number:
                if offset > entry["end"]:
                    yield f"position: {label} goes on at {offset} of {place}, which is there up to {entry['end']}"
                continue
            for other, one in self._transactions.items():
                spots = [spot for spot in one.spots if spot not in self._given_up]
                is_exempt = any(where in self._truncated or where.partition("/")[0] in self._deleted_topics
                                for where, _ in one.spots)  # fmt: skip
                if one.position != place or is_exempt or not spots:
                    continue
                is_visible = spots[0] in visible
                if (other == number and not is_visible) or (other > number and is_visible):
                    yield f"position: that of {place} in {label} is of {number}, and {other} is visible: {is_visible}"


def _key(record: str) -> str:
    return record.partition("@")[0].partition("/")[2]
