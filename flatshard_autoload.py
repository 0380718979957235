"""What torch calls when it is imported, where flatshard is installed: nothing, unless FLATSHARD=1 is set.

An entry point of the group ``torch.backends``. It is a module of its own so that it costs next to nothing.
"""

import os


def autoload() -> None:
    """With FLATSHARD=1 in the environment, call `flatshard.install`."""
    if os.environ.get("FLATSHARD") == "1":
        from flatshard.installing import install

        install()
