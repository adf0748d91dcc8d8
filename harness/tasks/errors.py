"""What ends a task in one line."""


class TaskError(RuntimeError):
    """A task that cannot go on."""
