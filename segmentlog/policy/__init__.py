"""Decisions, as pure functions: values in, a verdict or a plan out. The clock is an argument."""
