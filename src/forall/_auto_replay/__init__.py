"""Replay without `jit`: calls that are proved to be pure are recorded too."""
