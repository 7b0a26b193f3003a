"""Structured control flow: one meaning under every transform."""
