"""Serve one client connection: read requests, and answer them in the order in which they arrived.

A connection usually has no thread. When data has arrived, the loop (`loop`) calls `step`, which handles the requests
that cannot block. For a request that is large or may block, the connection gets a thread (`run`), which it keeps until
its requests are small again. The response queue of the connection sends the responses.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from segmentlog.server.api_table import NON_BLOCKING
from segmentlog.server.frames import MEDIUM_BYTES, BadFrame, FrameReader, IdleTooLong
from segmentlog.server.request_budget import ClientGone
from segmentlog.server.response_queue import Answer, ResponseQueue
from segmentlog.server.sasl_session import FAILED_DELAY_S
from segmentlog.server.transport import Idle, Transport
from segmentlog.server.worker_counters import Event, WorkerCounters

if TYPE_CHECKING:
    from segmentlog.security.principals import Principal
    from segmentlog.server.sasl_session import SaslSession

logger = logging.getLogger("segmentlog.server")

_LAST_ANSWERS_S: Final = 10.0
"""Time for a client that sends no more requests to receive its last responses."""
_SMALL_REQUESTS: Final = 16
"""After this many quick requests in a row, a connection continues without its thread."""


class StepResult(enum.Enum):
    """State of a connection after a step."""

    STAYS = 0
    """It waits for data."""
    NEEDS_THREAD = 1
    """Its next operation may block."""
    ENDED = 2
    """The connection has ended."""


class KafkaConnection:
    """Connection of one client, served until the client disconnects or `close` is called.

    `step`, `run` and `end` must be called by one thread at a time; all other methods are thread-safe.
    """

    def __init__(
        self,
        transport: Transport,
        frames: FrameReader,
        handle: Callable[[KafkaConnection, memoryview], Answer],
        *,
        client_host: str,
        principal: Principal,
        sasl: SaslSession | None = None,
        limit_bytes: int,
        unauthenticated_requests_max: int = 32,
        on_authenticated: Callable[[], None] | None = None,
        waiting_bytes_max: int = 4 << 20,
        meter: WorkerCounters | None = None,
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
        self.is_probe = False
        """A standby asked on this connection whether this server is alive."""
        self.has_left = False
        """The client left while a request was in progress. The connection handles later requests without a response."""
        self._meter = meter or WorkerCounters()
        self._transport = transport
        self._handle = handle
        self._limit_bytes = limit_bytes
        """Size limit of a request after authentication."""
        self._unauthenticated_requests_left = unauthenticated_requests_max
        self._is_authenticated = sasl is None
        self._on_authenticated = on_authenticated
        self._afterwards = afterwards
        """Called each time after responses were sent."""
        self._held: memoryview | None = None
        """A request that `step` has read, but that a thread must handle."""
        self._is_finishing = False
        self._is_last = False
        self.responses = ResponseQueue(transport, waiting_bytes_max, self._cannot_send)
        """Responses to be sent."""

    # ------------------------------------------------------------ requests

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._transport.fileno()

    def step(self) -> StepResult:
        """Handle the requests that have arrived, up to the first that may block. Never blocks."""
        try:
            return self._step()
        except Exception as error:
            self._fail(error)
            return StepResult.ENDED

    def _step(self) -> StepResult:
        """Return STAYS while the client sends nothing, and ENDED when the connection ends. Return NEEDS_THREAD if the
        next request may block, if a large request is arriving, or if responses wait for the client or for records.
        """
        frames, responses = self.frames, self.responses
        while not self.is_closed:
            try:
                if not frames.receive_now():
                    return StepResult.NEEDS_THREAD if responses else StepResult.ENDED
            except Idle:
                return StepResult.STAYS
            while (frame := frames.ready()) is not None:
                if not self._is_quick(frame):
                    self._held = frame
                    return StepResult.NEEDS_THREAD
                responses.put(self._answer(frame))
                if responses.is_full:
                    return StepResult.NEEDS_THREAD
            responses.flush_now()
            self._afterwards()
            if frames.is_large or responses.is_stuck:
                return StepResult.NEEDS_THREAD
            if self._is_finishing and not frames.has_more:
                return StepResult.NEEDS_THREAD if responses else StepResult.ENDED
            if not self._transport.has_more and not frames.is_cut_off:
                return StepResult.STAYS
        return StepResult.ENDED

    def run(self) -> StepResult:
        """Serve in the calling thread until the connection ends or needs no thread any more."""
        try:
            return self._run()
        except Exception as error:
            self._fail(error)
            return StepResult.ENDED

    def _run(self) -> StepResult:
        in_row, responses = 0, self.responses
        self._flush()
        while not self.is_closed:
            frame, self._held = self._held, None
            if frame is None:
                try:
                    frame = self.frames.next(leaves=self._may_leave)
                except Idle:
                    return StepResult.STAYS
                if frame is None:
                    self._flush()
                    responses.wait(_LAST_ANSWERS_S)
                    break
            if not self._is_authenticated:
                self._count_unauthenticated()
            is_quick = self._is_quick(frame)
            in_row = in_row + 1 if is_quick and len(frame) <= MEDIUM_BYTES else 0
            if not is_quick:
                self._flush()  # responses must not wait for a slow request
            responses.put(self._answer(frame))
            if responses.is_large:
                in_row = 0
            if self._is_last:
                self._flush()
                break
            frames_left = self.frames.has_more
            if not frames_left or responses.is_full:
                self._flush()
            if self._is_finishing and not frames_left:
                responses.wait(_LAST_ANSWERS_S)
                break
            if in_row >= _SMALL_REQUESTS and not frames_left and self._may_leave and not self._transport.has_more:
                return StepResult.STAYS
        return StepResult.ENDED

    def _answer(self, frame: memoryview) -> Answer:
        """Handle a request and return its response.

        If the client leaves meanwhile, the request ends without a response. The connection still handles the requests
        that the client sent after it, such as records with ``acks=0``. It sends no responses to them, because clients
        match responses to requests by their order.
        """
        try:
            answer = self._handle(self, frame)
        except ClientGone as error:
            if self.is_closed:
                raise
            self._log_end(error)
            self.has_left = True
        return None if self.has_left else answer

    def _flush(self) -> None:
        self.responses.flush()
        self._afterwards()

    def _is_quick(self, frame: memoryview) -> bool:
        """Return whether a request cannot block. False before authentication, which takes computing time."""
        return self._is_authenticated and len(frame) > 1 and not frame[0] and frame[1] in NON_BLOCKING

    @property
    def _may_leave(self) -> bool:
        """Whether the connection can continue without a thread: it is authenticated, and its client reads responses."""
        return self._is_authenticated and not self.responses.is_stuck

    def end(self) -> None:
        """Release all resources, after the last step or run."""
        self.close()
        self.frames.release()
        self.responses.close_transport()

    def _fail(self, error: Exception) -> None:
        """Log the error that ends the connection, and send the responses to earlier requests."""
        self._log_end(error)
        self.responses.flush_now()
        self._afterwards()

    def _log_end(self, error: Exception) -> None:
        if isinstance(error, (IdleTooLong, ClientGone)):
            logger.debug("%s: closed: %s", self.client_host, error)
        elif isinstance(error, BadFrame):
            self._meter.count_event(Event.CUT)
            logger.info("%s: closed: %s", self.client_host, error, extra=self._log_fields())
        elif isinstance(error, OSError):
            logger.debug("%s: closed: %s", self.client_host, error)
        else:
            self._meter.count_event(Event.CUT)
            logger.error("%s: closed", self.client_host, exc_info=error, extra=self._log_fields())

    @property
    def is_overdue(self) -> bool:
        """Whether a connection without a thread has been idle for too long."""
        frames = self.frames
        return frames.is_late or (frames.is_overdue() and not self.responses)

    def log_overdue(self) -> None:
        """Log why an overdue connection is closed."""
        if self.frames.is_late:
            self._log_end(BadFrame("the client did not authenticate in time"))
        elif self.frames.has_more:
            self._log_end(BadFrame("the rest of a request did not arrive in time"))
        else:
            self._log_end(IdleTooLong("no request arrived within the idle timeout"))

    def apply_sasl_state(self) -> None:
        """Apply the state of the SASL session: after a failure, wait, and then close the connection."""
        sasl = self.sasl
        if sasl is None:
            return
        if sasl.has_failed:
            self._meter.count_event(Event.SASL_FAILED)
            # Do not log the user name: people type passwords there by mistake.
            how = sasl.mechanism or "no supported mechanism"
            logger.info("%s: authentication failed (%s)", self.client_host, how, extra=self._log_fields())
            time.sleep(FAILED_DELAY_S)  # slows down password guessing
            self._is_last = True
        elif sasl.is_complete and sasl.principal is not None:
            self.principal = sasl.principal
            self.frames.limit_bytes = self._limit_bytes
            self.frames.deadline_s = float("inf")
            if not self._is_authenticated and self._on_authenticated is not None:
                self._on_authenticated()
            self._is_authenticated = True

    def _count_unauthenticated(self) -> None:
        """Count a request of an unauthenticated client. Raise `BadFrame` if it has sent too many."""
        self._unauthenticated_requests_left -= 1
        if self._unauthenticated_requests_left < 0:
            raise BadFrame("the client sent too many requests without authenticating")

    def _log_fields(self) -> dict[str, str]:
        return {"client_host": self.client_host, "client_id": self.client_id, "principal": str(self.principal)}

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        return self._transport.received_bytes, self._transport.sent_bytes

    def finish(self) -> None:
        """Accept no more requests, answer the requests that have arrived, and end the connection."""
        self._is_finishing = True  # do not wait for a client that continues to send
        self._transport.stop_receiving()

    def is_disconnected(self) -> bool:
        """Return whether the client has disconnected. Only for the thread of a request that takes long."""
        # After `finish` has shut down the socket, the socket looks as if the client had left.
        return self.is_closed or (not self._is_finishing and self._transport.is_disconnected())

    def abandon(self) -> None:
        """Close the copy of the socket in a forked child; the connection continues in the parent."""
        self.is_closed = True
        self._transport.close()

    def close(self) -> None:
        """End the connection; threads that read from it or write to it return with an error."""
        self.is_closed = True
        self._transport.shut_down()
        self.responses.close()

    def _cannot_send(self, error: OSError) -> None:
        logger.debug("%s: closed: %s", self.client_host, error)
        self.close()
