"""``python -m segmentlog``: the command line."""

from segmentlog.cli import main

main()
