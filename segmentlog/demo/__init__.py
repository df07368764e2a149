"""The steps of the demo command."""
