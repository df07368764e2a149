"""What all tests share."""

import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell that has no job control: processes that tests start and
    # interrupt would inherit this, and not hear the interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a busy machine is not a slow function.
settings.register_profile("segmentlog", deadline=None)
settings.load_profile("segmentlog")
