"""`python -m fedveil` is `fedveil`: the working directory, which Python puts first on the import path, comes off it."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from fedveil.cli import main

sys.exit(main())
