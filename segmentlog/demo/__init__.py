"""What the demo command shows."""
