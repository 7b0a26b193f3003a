"""Norms of per-example gradients without the gradients."""
