"""Entry point for `python -m fedveil`; first removes the working directory from the front of `sys.path`."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from fedveil.cli import main

sys.exit(main())
