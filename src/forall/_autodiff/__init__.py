"""Floor 2: what vjp and jvp mean, thin over torch's autograd."""
