"""Files of one folder named together, wherever they stood on the command line.

pytest 9.1 visits a folder again when its files are named in two places, and its second visit has lost the fixtures of
the folder's conftest.py (`fixture 'device' not found`).
"""


def pytest_configure(config):
    config.args.sort()
