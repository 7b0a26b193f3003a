"""The public transforms: each checks its arguments, flattens pytrees, enters and leaves levels."""
