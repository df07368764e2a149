"""Old path of `open_bucket` and `is_url`, kept as an alias since 0.1.

Use `segmentlog.open_bucket` instead; `is_url` is in `segmentlog.objects.bucket.url`.
"""

from segmentlog.objects.bucket.url import is_url as is_url
from segmentlog.objects.bucket.url import open_bucket as open_bucket

__all__ = ["is_url", "open_bucket"]
