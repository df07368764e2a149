"""Old path of `restore`, kept as an alias since 0.1. Use `segmentlog.restore` instead."""

from segmentlog.objects.restore.restore import Restored as Restored
from segmentlog.objects.restore.restore import restore as restore

__all__ = ["Restored", "restore"]
