"""``python -m benchmarks``: see `benchmarks.all_reduce`."""

import sys

from benchmarks.all_reduce import main

sys.exit(main())
