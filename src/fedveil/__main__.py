"""`python -m fedveil` is `fedveil`."""

import sys

from fedveil.cli import main

sys.exit(main())
