"""One connection: requests in, answers out, in the order of the requests.

Its thread reads a request, does it, and sends the answer. An answer that has to wait for the disk waits in a queue
while the next request is read; whoever completes it sends it, with all behind it that are ready. A fetch or a join that
waits for something keeps the connection to itself, as in Kafka: its client waits, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from segmentlog.server.frames import BadFrame, FrameReader, IdleTooLong
from segmentlog.server.meter import Event, Meter
from segmentlog.server.security.sasl import FAILED_DELAY_S
from segmentlog.server.transport import Buffer, Transport

if TYPE_CHECKING:
    from segmentlog.server.security.principals import Principal
    from segmentlog.server.security.sasl import SaslSession

logger = logging.getLogger("segmentlog.server")

_WAITING_MAX: Final = 128
"""Answers that wait for the disk; no more requests are read until one has gone."""


_LAST_ANSWERS_S: Final = 10.0
"""How long who sends nothing more is still answered."""


class Later:
    """An answer that is not there yet. `complete` it once, from any thread."""

    __slots__ = ("_connection", "buffers")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.buffers: Sequence[Buffer] | None = None

    def complete(self, buffers: Sequence[Buffer]) -> None:
        """The answer, with its length in front; it is sent when its turn comes, without waiting for a slow client."""
        self.buffers = buffers
        self._connection.send_ready()


Answer = Sequence[Buffer] | Later | None
"""Buffers with the length in front; or what will have them; None: nothing is answered."""


class Connection:
    """Serves one client until it goes, or `close` is called. `run` is for its own thread, the rest for any."""

    def __init__(
        self,
        transport: Transport,
        frames: FrameReader,
        handle: Callable[[Connection, memoryview], Answer],
        *,
        client_host: str,
        principal: Principal,
        sasl: SaslSession | None = None,
        limit_bytes: int,
        unknown_requests_max: int = 32,
        on_known: Callable[[Connection], None] | None = None,
        waiting_bytes_max: int = 4 << 20,
        meter: Meter | None = None,
    ) -> None:
        self.client_host = client_host
        self.principal = principal
        """Who the client is; until it has proved that, nobody in particular."""
        self.sasl = sasl
        """How it proves that; None where nothing has to be."""
        self.frames = frames
        self.client_id = ""
        """What the client called itself in its last request; for the log."""
        self.is_closed = False
        self._meter = meter or Meter()
        self._transport = transport
        self._handle = handle
        self._limit_bytes = limit_bytes
        """Of a request, once it is known who sends it."""
        self._unknown_requests_left = unknown_requests_max
        self._is_known = sasl is None
        self._on_known = on_known
        self._waiting_bytes_max = waiting_bytes_max
        self._is_finishing = False
        self._is_last = False
        self._sending = threading.Lock()
        self._waiting: deque[Later | Sequence[Buffer]] = deque()
        self._has_room = threading.Condition()
        self._is_stuck = False
        """A client that takes nothing has a thread that waits for it."""

    def run(self) -> None:
        """Serve. Whatever goes wrong ends this connection, and nothing else."""
        try:
            while not self.is_closed:
                frame = self.frames.next()
                if frame is None:
                    self.wait_for_answers(_LAST_ANSWERS_S)
                    break
                if not self._is_known:
                    self._count_unknown()
                answer = self._handle(self, frame)
                if answer is not None:
                    self._put(answer)
                if self._is_last:
                    break
                if self._is_finishing and not self.frames.has_more:
                    self.wait_for_answers(_LAST_ANSWERS_S)
                    break
        except IdleTooLong as error:
            logger.debug("%s: closed: %s", self.client_host, error)
        except BadFrame as error:
            self._meter.event(Event.CUT)
            logger.info("%s: closed: %s", self.client_host, error, extra=self._who())
        except OSError as error:
            logger.debug("%s: closed: %s", self.client_host, error)
        except Exception:
            self._meter.event(Event.CUT)
            logger.exception("%s: closed", self.client_host, extra=self._who())
        finally:
            self.close()
            self.frames.release()
            with self._sending:  # nobody is in the middle of sending
                self._transport.close()

    def authenticated(self) -> None:
        """The SASL session may have come further: who has failed is kept waiting, and then closed."""
        sasl = self.sasl
        if sasl is None:
            return
        if sasl.has_failed:
            self._meter.event(Event.SASL_FAILED)
            # Not the name that was claimed: people type their passwords there.
            how = sasl.mechanism or "no mechanism that there is"
            logger.info("%s: authentication failed (%s)", self.client_host, how, extra=self._who())
            time.sleep(FAILED_DELAY_S)  # who tries passwords waits for each
            self._is_last = True
        elif sasl.is_complete and sasl.principal is not None:
            self.principal = sasl.principal
            self.frames.limit_bytes = self._limit_bytes
            self.frames.deadline_s = float("inf")
            if not self._is_known and self._on_known is not None:
                self._on_known(self)
            self._is_known = True

    def _count_unknown(self) -> None:
        """One more request of who has not said who he is."""
        self._unknown_requests_left -= 1
        if self._unknown_requests_left < 0:
            raise BadFrame("it asks on, and does not say who it is")

    def _who(self) -> dict[str, str]:
        return {"client_host": self.client_host, "client_id": self.client_id, "principal": str(self.principal)}

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        return self._transport.received_bytes, self._transport.sent_bytes

    def finish(self) -> None:
        """Take no more requests, answer those that came, and end."""
        self._is_finishing = True  # who goes on sending is not waited for
        self._transport.stop_receiving()

    def is_left(self) -> bool:
        """Whether nobody is there any more who waits for an answer. For the thread of a request that takes long."""
        return self.is_closed or self._transport.is_left()

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's, and goes on there."""
        self.is_closed = True
        self._transport.close()

    def close(self) -> None:
        """End it; whoever reads from it or writes to it finds that it has ended."""
        self.is_closed = True
        self._transport.shut_down()
        with self._has_room:
            self._has_room.notify_all()

    def wait_for_answers(self, timeout_s: float) -> bool:
        """Until everything is answered that waits for the disk; whether it is."""
        with self._has_room:
            return self._has_room.wait_for(lambda: not self._waiting or self.is_closed, timeout_s)

    # ------------------------------------------------------------ answers

    def _put(self, answer: Later | Sequence[Buffer]) -> None:
        if not self._waiting and not isinstance(answer, Later):
            with self._sending:  # behind what was taken out of the queue a moment ago
                self._transport.send(answer)
            return
        self._waiting.append(answer)
        self.send_ready()
        if self._is_full(answer):
            with self._has_room:
                self._has_room.wait_for(lambda: not self._is_full(answer) or self.is_closed)

    def _is_full(self, last: Later | Sequence[Buffer]) -> bool:
        """Whether as many answers wait as may, or as many bytes: a client may ask for much and take nothing."""
        waiting = len(self._waiting)
        if waiting >= _WAITING_MAX:
            return True
        if waiting < 2 or isinstance(last, Later):  # what comes later, of a produce request, is small
            return False
        made = [_buffers_of(answer) or () for answer in self._waiting.copy()]
        return sum(len(buffer) for buffers in made for buffer in buffers) > self._waiting_bytes_max

    def send_ready(self) -> None:
        """Send the answers at the head of the queue that are complete. Waits for nobody."""
        waiting = self._waiting
        while waiting and not self.is_closed and _buffers_of(waiting[0]) is not None:
            if not self._sending.acquire(blocking=False):
                return  # whoever has it looks again
            try:
                if self._is_stuck:
                    return
                self._send_ready_locked()
            except OSError as error:
                logger.debug("%s: closed: %s", self.client_host, error)
                self.close()
            finally:
                self._sending.release()

    def _send_ready_locked(self) -> None:
        waiting = self._waiting
        while waiting:
            buffers = _buffers_of(waiting[0])
            if buffers is None:
                return
            left = self._transport.send_now(buffers)
            if left:
                waiting[0] = left
                self._is_stuck = True
                threading.Thread(target=self._send_to_slow, name="segmentlog-slow-client", daemon=True).start()
                return
            waiting.popleft()
            with self._has_room:
                self._has_room.notify_all()

    def _send_to_slow(self) -> None:
        """Wait for a client that takes nothing, in a thread of its own, until it has caught up."""
        waiting = self._waiting
        try:
            while True:
                with self._sending:
                    buffers = _buffers_of(waiting[0]) if waiting and not self.is_closed else None
                    if buffers is None:
                        self._is_stuck = False
                        break
                    self._transport.send(buffers)
                    waiting.popleft()
                with self._has_room:
                    self._has_room.notify_all()
        except OSError as error:
            logger.debug("%s: closed: %s", self.client_host, error)
            self.close()
        self.send_ready()  # of what was completed in between


def _buffers_of(answer: Later | Sequence[Buffer]) -> Sequence[Buffer] | None:
    return answer.buffers if isinstance(answer, Later) else answer
