"""Jobs that run on Spark over a whole topic."""
