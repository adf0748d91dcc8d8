"""Replay: every acceptance policy on one capture. README.md states the estimator and its limits."""
