"""Tracing and replay of calls: recorded programs, guards, passes, and code generation."""
