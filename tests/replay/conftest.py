"""Fixtures that the tests of jit have too."""

from jit.conftest import recorded  # noqa: F401 - pytest finds it here
