"""What happens to machines, links, the object store and clients. Each event ends when everything works again.

An event is a function of the game. `EVENTS` names them all; `play` draws some.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable

from machines.game import CLIENTS_HOST, SILENCE_S, Game, MachineOnHost
from machines.object_stores import HOST
from waiting import PATIENCE_S, wait_until

Event = Callable[[Game], None]


def play(game: Game, rounds: int, outage_s: float) -> None:
    """Run so many rounds: an event, its recovery, and some progress of everything that runs.

    Each kind of event occurs before any occurs again. ``outage_s``: the time without the object store.
    """
    game.outage_s = outage_s
    names: list[str] = []
    for number in range(rounds):
        if not names:
            names = [name for name, event in EVENTS.items() if game.object_store.kind == "s3" or event not in _S3_ONLY]
            game.rng.shuffle(names)
        name = names.pop()
        began_s = time.monotonic()
        game.note(f"round {number}: {name}")
        EVENTS[name](game)
        game.heal()
        game.wait_until_steady()
        game.wait_for_progress()
        game.seen[name] += 1
        game.note(f"round {number} took {time.monotonic() - began_s:.1f} s")


def _wait_a_while(game: Game, longest_s: float) -> None:
    """Let the state last for a drawn time; every length is right."""
    time.sleep(game.rng.uniform(0, longest_s))


def _kill(game: Game) -> None:
    owner, standby = game.owner(), game.standby()
    owner.kill()
    game.wait_for_owner(standby)
    _wait_a_while(game, 1)
    owner.start()


def _kill_and_restart(game: Game) -> None:
    """Let the machine restart before, during or after the takeover."""
    owner = game.owner()
    owner.kill()
    _wait_a_while(game, SILENCE_S)
    owner.start()


def _kill_both(game: Game) -> None:
    """All processes of both machines at the same time; they restart in any order."""
    for machine in game.machines:
        machine.kill()
    for machine in game.rng.sample(game.machines, 2):
        machine.start()
        _wait_a_while(game, 1)


def _kill_the_standby(game: Game) -> None:
    standby = game.standby()
    standby.kill()
    _wait_a_while(game, 1)
    standby.start()


def _terminate(game: Game) -> None:
    owner, standby = game.owner(), game.standby()
    owner.stop()
    game.wait_for_owner(standby)
    owner.start()


def _pause(game: Game) -> None:
    """SIGSTOP for longer than the silence, then SIGCONT."""
    owner, standby = game.owner(), game.standby()
    stop_machine(game, owner)
    game.wait_for_owner(standby)
    _wait_a_while(game, 2)
    owner.signal(signal.SIGCONT)


def _pause_briefly(game: Game) -> None:
    """SIGSTOP for about the silence: the standby takes over, or does not, or is about to."""
    owner = game.owner()
    stop_machine(game, owner)
    _wait_a_while(game, 2 * SILENCE_S)
    owner.signal(signal.SIGCONT)


def _pause_the_standby(game: Game) -> None:
    standby = game.standby()
    stop_machine(game, standby)
    _wait_a_while(game, 2 * SILENCE_S)
    standby.signal(signal.SIGCONT)


def stop_machine(game: Game, machine: MachineOnHost) -> None:
    """SIGSTOP, but not while the machine holds the lock of the folder: a takeover would wait for it."""

    def is_stopped() -> bool:
        machine.signal(signal.SIGSTOP)
        wait_until(lambda: all(map(_is_stopped, machine.pids)))
        if game.object_store.is_locked():
            machine.signal(signal.SIGCONT)
            return False
        return True

    wait_until(is_stopped, every_s=0.02)


def _is_stopped(pid: int) -> bool:
    """Return whether all threads of a process have stopped."""
    states = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/stat") as file:
            states.append(file.read().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)


def _cut_power(game: Game) -> None:
    owner, standby = game.owner(), game.standby()
    game.seen["unsynced writes lost"] += len(owner.cut_power(game.rng.randrange(1 << 30)))
    if game.rng.random() < 0.5:
        game.wait_for_owner(standby)
    owner.start()


def _cut_power_of_both(game: Game) -> None:
    for machine in game.machines:
        game.seen["unsynced writes lost"] += len(machine.cut_power(game.rng.randrange(1 << 30)))
    for machine in game.rng.sample(game.machines, 2):
        machine.start()
        _wait_a_while(game, 1)


def _cut_power_of_the_standby(game: Game) -> None:
    standby = game.standby()
    game.seen["unsynced writes lost"] += len(standby.cut_power(game.rng.randrange(1 << 30)))
    standby.start()


def _cut_one_way(game: Game) -> None:
    """Cut the link between the machines in one direction. The owner ships meanwhile."""
    pair = game.rng.sample([game.owner().name, game.standby().name], 2)
    game.note(f"cut {pair[0]} -> {pair[1]}")
    game.network.cut(*pair)
    _wait_a_while(game, 2 * SILENCE_S)


def _silence_the_owner(game: Game) -> None:
    """All packets from the owner are lost, or all packets to it. The standby takes over."""
    owner, standby = game.owner(), game.standby()
    is_from = game.rng.random() < 0.5
    game.note(f"cut everything {'from' if is_from else 'to'} {owner.name}")
    for other in (standby.name, HOST, CLIENTS_HOST):
        game.network.cut(*((owner.name, other) if is_from else (other, owner.name)))
    game.wait_for_owner(standby)
    _wait_a_while(game, 2)


def _isolate_with_clients(game: Game) -> None:
    """Cut the owner from everything except its clients. The standby takes over."""
    owner, standby = game.owner(), game.standby()
    for other in (standby.name, HOST):
        game.network.cut(owner.name, other)
        game.network.cut(other, owner.name)
    game.wait_for_owner(standby)
    _wait_a_while(game, 2)


def _cut_the_owner_from_the_object_store(game: Game) -> None:
    """In one direction. The standby reaches the owner, and does not take over."""
    owner = game.owner()
    pair = game.rng.sample([owner.name, HOST], 2)
    game.note(f"cut {pair[0]} -> {pair[1]}")
    game.network.cut(*pair)
    _wait_a_while(game, 2 * SILENCE_S)


def _cut_clients(game: Game) -> None:
    """Clients lose a machine in one direction."""
    pair = game.rng.sample([CLIENTS_HOST, game.rng.choice(game.machines).name], 2)
    game.note(f"cut {pair[0]} -> {pair[1]}")
    game.network.cut(*pair)
    _wait_a_while(game, 2 * SILENCE_S)


def _lose_the_object_store(game: Game) -> None:
    """No machine reaches the object store, and then both do again."""
    game.object_store.disconnect()
    time.sleep(game.outage_s)


def _lose_the_object_store_and_the_owner(game: Game) -> None:
    """Kill the owner while no machine reaches the object store: no takeover until it is back."""
    owner = game.owner()
    game.object_store.disconnect()
    _wait_a_while(game, 1)
    owner.kill()
    _wait_a_while(game, SILENCE_S)
    game.heal()
    _wait_a_while(game, 2)
    owner.start()


def _kill_the_local_program(game: Game) -> None:
    owner = game.owner()
    owner.kill_program()
    owner.start_program()


def _kill_a_client(game: Game) -> None:
    """Another takes its place, under the same transactional id."""
    pid = game.rng.choice(list(game.running))
    order = game.running[pid]
    game.kill(pid)
    game.enter({key: value for key, value in order.items() if key not in ("label", "log")})


def _kill_a_server_process(game: Game) -> None:
    """One of the server's processes; its supervisor starts another, or all end with the supervisor."""
    machine = game.rng.choice(game.machines)
    assert machine.process is not None
    processes = machine.pids[:-1]
    pid = game.rng.choice(processes)
    os.kill(pid, signal.SIGKILL)
    if pid == processes[0]:
        machine.finish()
        machine.kill_program()
        machine.start()


def _hand_over(game: Game) -> None:
    """Hand the store over to the standby, as a person does."""
    owner, standby = game.owner(), game.standby()
    command = [*owner.program(), "--dir", str(owner.path), "takeover", "--hand-over", "--wait", "60s"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=owner.environment()
    )
    assert done.returncode == 0, f"{done.stderr}\n{game.describe()}"
    game.wait_for_owner(standby)


EVENTS: dict[str, Event] = {
    "kill -9 of the owner": _kill,
    "kill -9 of the owner, and a restart": _kill_and_restart,
    "kill -9 of both machines": _kill_both,
    "kill -9 of the standby": _kill_the_standby,
    "SIGTERM of the owner": _terminate,
    "the owner stops and continues": _pause,
    "the owner stops briefly": _pause_briefly,
    "the standby stops and continues": _pause_the_standby,
    "power cut of the owner": _cut_power,
    "power cut of both machines": _cut_power_of_both,
    "power cut of the standby": _cut_power_of_the_standby,
    "one direction between the machines": _cut_one_way,
    "one direction of the owner": _silence_the_owner,
    "the owner is alone with the clients": _isolate_with_clients,
    "one direction between owner and object store": _cut_the_owner_from_the_object_store,
    "one direction between clients and a machine": _cut_clients,
    "the object store is unreachable": _lose_the_object_store,
    "the object store is unreachable, and the owner ends": _lose_the_object_store_and_the_owner,
    "kill -9 of the local program": _kill_the_local_program,
    "kill -9 of a client": _kill_a_client,
    "kill -9 of one process of a server": _kill_a_server_process,
    "a hand-over": _hand_over,
}
_S3_ONLY: Iterable[Event] = (
    _silence_the_owner, _isolate_with_clients, _cut_the_owner_from_the_object_store,
    _lose_the_object_store_and_the_owner,
)  # fmt: skip
"""Between machines and a folder there is no link of the network. A process that waits for a stopped file system cannot
be killed."""
