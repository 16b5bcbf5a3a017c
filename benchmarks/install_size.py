"""What an installation downloads, in MB: pip downloads the package and all that it needs.

    python benchmarks/install_size.py torch==2.13.0
    python benchmarks/install_size.py torch==2.13.0 --extra huggingface

The first arguments are given to pip beside the package. Which build of PyTorch it finds depends on
pip's own settings, such as the variable PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Download into a folder that is removed, and print the sizes, the largest first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", nargs="*", help="beside the package, such as torch==2.13.0")
    parser.add_argument("--extra", action="append", default=[], help="an extra of the package")
    arguments = parser.parse_args()
    extras = f"[{','.join(arguments.extra)}]" if arguments.extra else ""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder]
        subprocess.run([*pip, *arguments.requirements, f"{ROOT}{extras}"], check=True)
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:5]:
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:8.1f} MB  {len(sizes)} files in all")
    print(f"{date.today()}, Python {platform.python_version()}, {platform.system()}")


if __name__ == "__main__":
    main()
