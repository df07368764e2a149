"""``python -m segmentlog`` and the command ``segmentlog``: the command line.

Nothing is imported here that takes time: who presses Ctrl-C while modules load is to see no traceback.
"""

import os
import signal


def leave(number: int, frame: object) -> None:
    """What a signal does as long as there is nothing to finish: the status is what a shell says of it."""
    os._exit(128 + number)


def main() -> None:
    """Run the command line; ends the process with its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
        signal.signal(signal.SIGINT, leave)
    from segmentlog.cli import main as run

    run()


if __name__ == "__main__":
    main()
