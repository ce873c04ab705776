"""The command line, on top of the public API."""

__all__: list[str] = []
