"""Sweep of torch's own operator samples through vmap, judged by the loop."""
