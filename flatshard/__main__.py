"""``python -m flatshard``: the command ``flatshard``."""

import sys

from flatshard.cli import main

sys.exit(main())
