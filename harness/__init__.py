"""The benchmark: launch an engine, prove which acceptance policy ran, send traffic, score it, record it."""
