"""Entry point of `python -m fedveil`. Removes the working directory, which Python puts first on the import path."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from fedveil.cli import main

sys.exit(main())
