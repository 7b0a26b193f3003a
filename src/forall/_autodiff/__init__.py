"""Floor 2: vjp and jvp, thin layers over torch's autograd."""
