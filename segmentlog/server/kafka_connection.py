"""One connection: requests in, answers out, in the order of the requests.

Most of the time it has no thread: the loop (`loop`) tells it that something has come, and it does what is quickly done
(`step`). For a request that is large, or that may take long, it gets a thread (`run`), until its requests are small
again. Its answers go by way of its `outbox`.
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
"""How long who sends nothing more is still answered."""
_SMALL_REQUESTS: Final = 16
"""So many in a row that are quickly done, and a connection needs no thread any more."""


class Turn(enum.Enum):
    """How a connection is after a step."""

    STAYS = 0
    """It waits for what comes."""
    NEEDS_THREAD = 1
    """What it has to do may take long."""
    ENDED = 2
    """It is over."""


class Connection:
    """Serves one client until it goes, or `close` is called.

    `step`, `run` and `end` are for one thread at a time, the rest is for any.
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
        """Who the client is; until it has proved that, nobody in particular."""
        self.sasl = sasl
        """How it proves that; None where nothing has to be."""
        self.frames = frames
        self.client_id = ""
        """What the client called itself in its last request; for the log."""
        self.is_closed = False
        self.is_polling = False
        """A fetch waits for records; there is but one at a time."""
        self.has_left = False
        """A request was given up because the client had left. The requests behind it are done, none is answered."""
        self._meter = meter or Meter()
        self._transport = transport
        self._handle = handle
        self._limit_bytes = limit_bytes
        """Of a request, once it is known who sends it."""
        self._unknown_requests_left = unknown_requests_max
        self._is_known = sasl is None
        self._on_known = on_known
        self._afterwards = afterwards
        """Called when answers were sent."""
        self._held: memoryview | None = None
        """A request that is left to a thread."""
        self._is_finishing = False
        self._is_last = False
        self.outbox = Outbox(transport, waiting_bytes_max, self._cannot_send)
        """Its answers."""

    # ------------------------------------------------------------ requests

    def fileno(self) -> int:
        """Of its socket."""
        return self._transport.fileno()

    def step(self) -> Turn:
        """Do what has come, as far as it is quickly done; waits for nothing."""
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
        """Serve, in a thread of its own, until it is over, or needs none any more."""
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
                self._flush()  # nobody waits for what takes long
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
        """Do a request and return its answer.

        A request that is given up because the client has left ends nothing else: behind it may be what the client
        sent last, such as records without acknowledgement. Once an answer is missing no other is sent, because
        clients match answers to requests by their order.
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
        """Whether a request takes next to no time. Who has yet to say who he is may make us compute."""
        return self._is_known and len(frame) > 1 and not frame[0] and frame[1] in QUICK

    @property
    def _may_leave(self) -> bool:
        """Whether it may go on without a thread: who it is is known, and its answers go."""
        return self._is_known and not self.outbox.is_stuck

    def end(self) -> None:
        """Give everything back, once nobody steps or runs it any more."""
        self.close()
        self.frames.release()
        self.outbox.close_transport()

    def _end_for(self, error: Exception) -> None:
        """Whatever goes wrong ends this connection, and nothing else; what was done before is answered."""
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
        """Whether nothing has come for too long, while it had no thread."""
        frames = self.frames
        return frames.is_late or (frames.is_overdue() and not self.outbox)

    def say_overdue(self) -> None:
        """Why it is ended."""
        if self.frames.is_late:
            self._say(BadFrame("it did not say who it is in time"))
        elif self.frames.has_more:
            self._say(BadFrame("nothing came for too long, or next to nothing"))
        else:
            self._say(IdleTooLong("no request came for too long"))

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
                self._on_known()
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
        # Once it finishes, the socket looks as if the client had gone: that is our own doing.
        return self.is_closed or (not self._is_finishing and self._transport.is_left())

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's, and goes on there."""
        self.is_closed = True
        self._transport.close()

    def close(self) -> None:
        """End it; whoever reads from it or writes to it finds that it has ended."""
        self.is_closed = True
        self._transport.shut_down()
        self.outbox.close()

    def _cannot_send(self, error: OSError) -> None:
        logger.debug("%s: closed: %s", self.client_host, error)
        self.close()
