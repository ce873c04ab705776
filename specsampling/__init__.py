"""Speculative sampling for any framework (under construction)."""
