"""Structured control flow: operators with the same semantics under every transform."""
