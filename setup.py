"""Puts the tuning records of ``tuning_logs/`` into the package; everything else is in setup.cfg."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# What tvm_tile.compile reads. The databases of all trials stay in the repository.
RECORDS = "*/*/best.json"


class BuildWithRecords(build_py):
    """Copies the winners beside the modules, where ``tvm_tile.tune.records`` looks for them."""

    def run(self):
        super().run()
        if self.editable_mode:
            return  # a checkout's own folder is found as it is
        source = Path(__file__).parent / "tuning_logs"
        for path in sorted(source.glob(RECORDS)):
            target = Path(self.build_lib) / "tvm_tile" / "tuning_logs" / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


setup(cmdclass={"build_py": BuildWithRecords})
