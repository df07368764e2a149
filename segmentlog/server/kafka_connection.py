"""Serve one client connection: read requests, and answer them in their order.

A connection usually has no thread. The loop (`loop`) calls `step` when data has arrived, which does the requests that
cannot block. For a request that is large or may block, the connection gets a thread (`run`) until its requests are
small again. Responses leave through its response queue.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from segmentlog.server.api_table import QUICK
from segmentlog.server.frames import MEDIUM_BYTES, BadFrame, FrameReader, IdleTooLong
from segmentlog.server.request_budget import ClientGone
from segmentlog.server.response_queue import Answer, Outbox
from segmentlog.server.sasl_session import FAILED_DELAY_S
from segmentlog.server.transport import Idle, Transport
from segmentlog.server.worker_counters import Event, Meter

if TYPE_CHECKING:
    from segmentlog.security.principals import Principal
    from segmentlog.server.sasl_session import SaslSession

logger = logging.getLogger("segmentlog.server")

_LAST_ANSWERS_S: Final = 10.0
"""Time that a client which sends no more requests has to take its last responses."""
_SMALL_REQUESTS: Final = 16
"""After this many quick requests in a row a connection gives its thread back."""


class Turn(enum.Enum):
    """State of a connection after a step."""

    STAYS = 0
    """It waits for data."""
    NEEDS_THREAD = 1
    """Its next operation may block."""
    ENDED = 2
    """The connection has ended."""


class Connection:
    """Connection of one client, served until the client disconnects or `close` is called.

    `step`, `run` and `end` must be called by one thread at a time; all other methods are thread-safe.
    """

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
        on_known: Callable[[], None] | None = None,
        waiting_bytes_max: int = 4 << 20,
        meter: Meter | None = None,
        afterwards: Callable[[], object] = int,
    ) -> None:
        self.client_host = client_host
        self.principal = principal
        """Authenticated identity of the client; anonymous before authentication."""
        self.sasl = sasl
        """State of SASL authentication; None on a listener without authentication."""
        self.frames = frames
        self.client_id = ""
        """Client id of the last request, for the log."""
        self.is_closed = False
        self.is_polling = False
        """A fetch of this connection waits for records; a connection has at most one such fetch."""
        self.has_left = False
        """The client left while a request was in progress. Later requests are done, but not answered."""
        self._meter = meter or Meter()
        self._transport = transport
        self._handle = handle
        self._limit_bytes = limit_bytes
        """Size limit of a request after authentication."""
        self._unknown_requests_left = unknown_requests_max
        self._is_known = sasl is None
        self._on_known = on_known
        self._afterwards = afterwards
        """Called after responses were sent."""
        self._held: memoryview | None = None
        """A request that `step` leaves to a thread."""
        self._is_finishing = False
        self._is_last = False
        self.outbox = Outbox(transport, waiting_bytes_max, self._cannot_send)
        """Responses to be sent."""

    # ------------------------------------------------------------ requests

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._transport.fileno()

    def step(self) -> Turn:
        """Do the requests that have arrived, up to the first that may block. Never blocks."""
        try:
            return self._step()
        except Exception as error:
            self._end_for(error)
            return Turn.ENDED

    def _step(self) -> Turn:
        frames, outbox = self.frames, self.outbox
        while not self.is_closed:
            try:
                if not frames.receive_now():
                    return Turn.NEEDS_THREAD if outbox else Turn.ENDED
            except Idle:
                return Turn.STAYS
            while (frame := frames.ready()) is not None:
                if not self._is_quick(frame):
                    self._held = frame
                    return Turn.NEEDS_THREAD
                outbox.put(self._answer(frame))
                if outbox.is_crowded:
                    return Turn.NEEDS_THREAD
            outbox.flush_now()
            self._afterwards()
            if frames.is_large or outbox.is_stuck:
                return Turn.NEEDS_THREAD
            if self._is_finishing and not frames.has_more:
                return Turn.NEEDS_THREAD if outbox else Turn.ENDED
            if not self._transport.has_more and not frames.is_cut_off:
                return Turn.STAYS
        return Turn.ENDED

    def run(self) -> Turn:
        """Serve in the calling thread until the connection ends or needs no thread any more."""
        try:
            return self._run()
        except Exception as error:
            self._end_for(error)
            return Turn.ENDED

    def _run(self) -> Turn:
        in_row, outbox = 0, self.outbox
        self._flush()
        while not self.is_closed:
            frame, self._held = self._held, None
            if frame is None:
                try:
                    frame = self.frames.next(leaves=self._may_leave)
                except Idle:
                    return Turn.STAYS
                if frame is None:
                    self._flush()
                    outbox.wait(_LAST_ANSWERS_S)
                    break
            if not self._is_known:
                self._count_unknown()
            is_quick = self._is_quick(frame)
            in_row = in_row + 1 if is_quick and len(frame) <= MEDIUM_BYTES else 0
            if not is_quick:
                self._flush()  # responses must not wait for a slow request
            outbox.put(self._answer(frame))
            if outbox.is_large:
                in_row = 0
            if self._is_last:
                self._flush()
                break
            frames_left = self.frames.has_more
            if not frames_left or outbox.is_crowded:
                self._flush()
            if self._is_finishing and not frames_left:
                outbox.wait(_LAST_ANSWERS_S)
                break
            if in_row >= _SMALL_REQUESTS and not frames_left and self._may_leave and not self._transport.has_more:
                return Turn.STAYS
        return Turn.ENDED

    def _answer(self, frame: memoryview) -> Answer:
        """Do a request and return its response.

        If the client has left, the request is given up, but later requests are still done: they may be the last that
        the
        client sent, such as records with ``acks=0``. After a missing response no other is sent, because clients match
        responses to requests by order.
        """
        try:
            answer = self._handle(self, frame)
        except ClientGone as error:
            if self.is_closed:
                raise
            self._say(error)
            self.has_left = True
        return None if self.has_left else answer

    def _flush(self) -> None:
        self.outbox.flush()
        self._afterwards()

    def _is_quick(self, frame: memoryview) -> bool:
        """Whether a request cannot block. Requests of an unauthenticated client do not count: they cost computation."""
        return self._is_known and len(frame) > 1 and not frame[0] and frame[1] in QUICK

    @property
    def _may_leave(self) -> bool:
        """Whether the connection can continue without a thread: it is authenticated, and its client takes responses."""
        return self._is_known and not self.outbox.is_stuck

    def end(self) -> None:
        """Release all resources, after the last step or run."""
        self.close()
        self.frames.release()
        self.outbox.close_transport()

    def _end_for(self, error: Exception) -> None:
        """Log why the connection ends, and send the responses of earlier requests."""
        self._say(error)
        self.outbox.flush_now()
        self._afterwards()

    def _say(self, error: Exception) -> None:
        if isinstance(error, (IdleTooLong, ClientGone)):
            logger.debug("%s: closed: %s", self.client_host, error)
        elif isinstance(error, BadFrame):
            self._meter.event(Event.CUT)
            logger.info("%s: closed: %s", self.client_host, error, extra=self._who())
        elif isinstance(error, OSError):
            logger.debug("%s: closed: %s", self.client_host, error)
        else:
            self._meter.event(Event.CUT)
            logger.error("%s: closed", self.client_host, exc_info=error, extra=self._who())

    @property
    def is_overdue(self) -> bool:
        """Whether a connection without a thread has been idle for too long."""
        frames = self.frames
        return frames.is_late or (frames.is_overdue() and not self.outbox)

    def say_overdue(self) -> None:
        """Log why an overdue connection is closed."""
        if self.frames.is_late:
            self._say(BadFrame("the client did not authenticate in time"))
        elif self.frames.has_more:
            self._say(BadFrame("the rest of a request did not arrive in time"))
        else:
            self._say(IdleTooLong("no request arrived within the idle timeout"))

    def authenticated(self) -> None:
        """Apply the state of the SASL session: a failed client is delayed and then closed."""
        sasl = self.sasl
        if sasl is None:
            return
        if sasl.has_failed:
            self._meter.event(Event.SASL_FAILED)
            # Do not log the user name: people type passwords there by mistake.
            how = sasl.mechanism or "no supported mechanism"
            logger.info("%s: authentication failed (%s)", self.client_host, how, extra=self._who())
            time.sleep(FAILED_DELAY_S)  # slows down password guessing
            self._is_last = True
        elif sasl.is_complete and sasl.principal is not None:
            self.principal = sasl.principal
            self.frames.limit_bytes = self._limit_bytes
            self.frames.deadline_s = float("inf")
            if not self._is_known and self._on_known is not None:
                self._on_known()
            self._is_known = True

    def _count_unknown(self) -> None:
        """Count a request of an unauthenticated client. Raise `BadFrame` if it has sent too many."""
        self._unknown_requests_left -= 1
        if self._unknown_requests_left < 0:
            raise BadFrame("the client sent too many requests without authenticating")

    def _who(self) -> dict[str, str]:
        return {"client_host": self.client_host, "client_id": self.client_id, "principal": str(self.principal)}

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        return self._transport.received_bytes, self._transport.sent_bytes

    def finish(self) -> None:
        """Accept no more requests, answer those that have arrived, and end."""
        self._is_finishing = True  # do not wait for a client that continues to send
        self._transport.stop_receiving()

    def is_left(self) -> bool:
        """Whether the client has disconnected. For the thread of a request that takes long."""
        # `finish` shuts the socket down itself, which looks like a client that has left.
        return self.is_closed or (not self._is_finishing and self._transport.is_left())

    def abandon(self) -> None:
        """Close the copy of the socket in a forked child; the connection continues in the parent."""
        self.is_closed = True
        self._transport.close()

    def close(self) -> None:
        """End the connection; threads that read from it or write to it return with an error."""
        self.is_closed = True
        self._transport.shut_down()
        self.outbox.close()

    def _cannot_send(self, error: OSError) -> None:
        logger.debug("%s: closed: %s", self.client_host, error)
        self.close()
