"""Engines: what a task asks of one (`base`), the HTTP client (`native`), the embedded engine (`reference`)."""
