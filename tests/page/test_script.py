"""The page's script: it writes sizes as the rest of the page does."""

import json
import re
import shutil
import subprocess

import pytest

from memcallback.core.units import GiB, KiB, MiB, brief_bytes
from memcallback.page.page import Page

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
def test_sizes_under_the_pointer_are_written_as_in_the_text():
    html = Page(title="", verdict=("Fits.",), is_good=None, sections=[]).html()
    functions = re.search(r"  const units = .*?\n  };\n", html, re.DOTALL)[0]
    sizes = [0, 999, 1000, 1023, KiB, 999 * KiB, 1000 * KiB, 5 * MiB + 1, 42 * MiB, 9994 * KiB]
    sizes += [999 * MiB, 999 * MiB + 600 * KiB, 1000 * MiB, 1023 * MiB, GiB, 13 * GiB, 640 * GiB]
    program = f"{functions}console.log(JSON.stringify({json.dumps(sizes)}.map(size)));"
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [brief_bytes(size) for size in sizes]
