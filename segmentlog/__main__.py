"""``python -m segmentlog`` and the command ``segmentlog``: the command line.

This module imports nothing that takes time, so that Ctrl-C while modules load causes no traceback.
"""

import os
import signal


def exit_on_signal(number: int, frame: object) -> None:
    """Exit on a signal while there is nothing to clean up, with the exit status that a shell reports for it."""
    os._exit(128 + number)


def main() -> None:
    """Run the command line, and end the process with its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # unless it is ignored
        signal.signal(signal.SIGINT, exit_on_signal)
    from segmentlog.cli import main as run

    run()


if __name__ == "__main__":
    main()
