"""`python -m bertsmith …` is the same program as `bertsmith …`."""

import sys

from bertsmith.cli import main

if __name__ == "__main__":
    sys.exit(main())
