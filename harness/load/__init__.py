"""Whether the client keeps up: a mock engine whose truth is known, asked by this client and by others in one run."""
