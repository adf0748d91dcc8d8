"""Acceptance rules, one folder each: README (formula), naive.py (torch oracle), triton.py (kernel), one `accept`."""
