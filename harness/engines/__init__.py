"""Engines: what a task asks of one (`base`), the HTTP client (`native`), the embedded engine (`reference`)."""

CLIENTS = ("native",)  # values of engine.api that can be spoken to
