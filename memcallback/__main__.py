"""`python -m memcallback`."""

import sys

from memcallback.cli import main

if __name__ == "__main__":
    sys.exit(main())
