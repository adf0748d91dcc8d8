"""What pyproject.toml cannot say: a .pth file beside the packages, which arms LightLLM (adapters/lightllm/README.md).

Every Python of the environment reads it at start. It does nothing unless SPECACCEPT_POLICY is set.
"""

from os.path import relpath
from sysconfig import get_path

import setuptools


class Distribution(setuptools.Distribution):
    def has_data(self):
        """An editable install asks this before it installs data files; setuptools itself only has `has_data_files`."""
        return self.has_data_files()


setuptools.setup(
    distclass=Distribution,
    data_files=[(relpath(get_path("purelib"), get_path("data")), ["adapters/lightllm/specaccept-lightllm.pth"])],
)
