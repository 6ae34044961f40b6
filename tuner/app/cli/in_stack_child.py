"""The process of `--stack`: tuner, with the releases of that stack.

Whatever fails there that is no answer is a release that cannot be traced: an error with exit code
3, in place of a traceback.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line, after the libraries have the names that tuner asks for."""
    from tuner.app.in_stack import cannot
    from tuner.core.environment import STACK_VARIABLE
    from tuner.core.errors import EXIT_UNAVAILABLE

    try:
        from tuner.predict.older import use_todays_names

        use_todays_names()
        from tuner.app.cli.main import main as run
    except Exception as error:  # noqa: BLE001 - any: the libraries are other releases
        print(f"error: {cannot(os.environ[STACK_VARIABLE], error)}", file=sys.stderr)
        sys.exit(EXIT_UNAVAILABLE)
    run()


if __name__ == "__main__":
    main()
