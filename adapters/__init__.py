"""Acceptance rules for speculative decoding, and the adapters that arm them inside an engine.

Importing this package pulls in neither torch nor an engine: an adapter is loaded by the process it arms, and one that
was not asked for must cost nothing.
"""

__version__ = "0.1.0"
