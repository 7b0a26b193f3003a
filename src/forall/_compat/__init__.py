"""Floor 0, the frontier: the only place that names private torch things."""
