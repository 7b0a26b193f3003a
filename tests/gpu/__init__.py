"""Checks of forall on an accelerator, run by `make gpu`."""
