"""Pages about named producers and their transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from segmentlog.http.console.forms import Form, first_value
from segmentlog.http.console.pages import Console, Paging, redirect_after_post
from segmentlog.http.error_responses import HttpProblem
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.texts import visible

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from segmentlog.transactions.transaction_log import TransactionState

_PRODUCERS: Final = 100


class Row(NamedTuple):
    """A named producer in the table."""

    name: str
    state: TransactionState
    life: str
    """"alive", "gone", or "a client" of a Kafka server, whose state this process cannot check."""
    since_ms: int
    partitions: list[str]
    hidden_count: int


class TransactionPages:
    """Handlers of the pages about transactions."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store = console.store

    def list_producers(self, request: Request) -> Response:
        """List the producers that the principal may see, open transactions first."""
        part = request.query_params.get("q", "").strip().lower()
        only_open = request.query_params.get("open") == "1"
        states = {
            name: state
            for name, state in sorted(
                self._store.transactions.states().items(), key=lambda one: (not one[1].is_open, one)
            )
            if self._console.may_see(request, Thing.TRANSACTIONAL_ID, name)
        }
        found = [
            name
            for name, state in states.items()
            if (not part or part in name.lower()) and (state.is_open or not only_open)
        ]
        paging = Paging(request, len(found), _PRODUCERS)
        rows = [self._row(request, name, states[name]) for name in found[paging.begin : paging.end]]
        return self._console.render(
            request, "transactions.html", nav="transactions", rows=rows, paging=paging, count=len(states),
            open_count=sum(state.is_open for state in states.values()), only_open=only_open,
            q=request.query_params.get("q", ""), now_ms=self._console.now_ms(),
            may_abort={row.name for row in rows if row.state.is_open and self._may_abort(request, row.name)},
        )  # fmt: skip

    def show_abort_form(self, request: Request) -> Response:
        """Ask for the producer's name before aborting its transaction."""
        return self._render_abort_form(request, request.query_params.get("name", ""), "")

    def abort_transaction(self, request: Request, form: Form) -> Response:
        """Abort the transaction if the form's field contains the producer's name, which confirms the abort."""
        name = request.query_params.get("name", "")
        self._console.check_write(request, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name)
        if first_value(form, "name") not in (name, visible(name)):
            return self._render_abort_form(request, name, "This is not the producer's name; nothing was aborted.")
        if name not in self._store.transactions.states():
            raise HttpProblem(404, f"producer {name!r} does not exist")
        return redirect_after_post(
            "/transactions", done="aborted" if self._store.transactions.abort_by_name(name) else "ended"
        )

    def _render_abort_form(self, request: Request, name: str, error: str) -> Response:
        self._console.check_write(request, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name)
        state = self._store.transactions.states().get(name)
        if state is None:
            raise HttpProblem(404, f"producer {name!r} does not exist")
        return self._console.render(
            request, "abort.html", 422 if error else 200, nav="transactions", row=self._row(request, name, state),
            error=error, command=self._console.command(request, "transactions", "abort", name),
        )  # fmt: skip

    def _row(self, request: Request, name: str, state: TransactionState) -> Row:
        if state.is_server_name:
            life = "a client"
        else:
            life = "alive" if self._store.transactions.is_alive(name, state) else "gone"
        names = self._store.topic_names({where.topic_id for where in state.partitions})
        seen = [
            f"{names[where.topic_id]}/{where.partition}"
            for where in state.partitions
            if where.topic_id in names and self._console.may_see_topic(request, names[where.topic_id])
        ]
        since_ms = state.started_ms if state.is_open else state.updated_ms
        return Row(name, state, life, since_ms, seen, len(state.partitions) - len(seen))

    def _may_abort(self, request: Request, name: str) -> bool:
        return self._console.may_write(request, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name)
