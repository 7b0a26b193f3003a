"""Access to torch's private interfaces: the only package that names them."""
