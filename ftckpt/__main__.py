"""The command line: the installed script, and `python -m ftckpt` where there is none."""

import signal
import sys
from typing import NoReturn


def main() -> None:
    """Run it; until it can say that it was interrupted, Ctrl-C ends it without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from ftckpt.commands.cli.app import main as run
    except OSError as error:
        _unreadable(error)
    run()


def _unreadable(error: OSError) -> NoReturn:
    """End with what a lost filesystem is to every verb (10): ftckpt itself lies on one."""
    message = f"cannot read {error.filename or 'its own modules'}: {error.strerror}"
    hint = "the filesystem that ftckpt is installed on is away"
    sys.stderr.write(f"ftckpt: {message}\nhint: {hint}\n")
    if "--json" in sys.argv:
        import json

        result = {"code": 10, "name": "UNAVAILABLE", "message": message, "hint": hint}
        sys.stdout.write(json.dumps({"schema": "ftckpt/1", "result": result}) + "\n")
    sys.exit(10)


if __name__ == "__main__":
    main()
