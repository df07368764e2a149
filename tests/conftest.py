"""What all tests share."""

from hypothesis import settings

# No deadline: a busy machine is not a slow function.
settings.register_profile("segmentlog", deadline=None)
settings.load_profile("segmentlog")
