"""The command line: the installed script, and `python -m ftckpt` where there is none."""

import gc
import signal
import sys
from typing import NoReturn


def main() -> None:
    """Run it; until it can say that it was interrupted, Ctrl-C ends it without a traceback."""
    # Modules make next to no garbage: by default it would be looked for fifty times meanwhile.
    gc.set_threshold(50_000)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["__complete"]:
        from ftckpt.commands.completing import main as complete

        complete(sys.argv[2:])
    try:
        from ftckpt.commands.cli.app import main as run
    except OSError as error:  # what a lost filesystem is to every verb: ftckpt lies on one
        message = f"cannot read {error.filename or 'its own modules'}: {error.strerror}"
        _end(10, "UNAVAILABLE", message, "the filesystem that ftckpt is installed on is away")
    except ModuleNotFoundError as error:
        from ftckpt.packages import missing_package

        missing = missing_package(error, "the command line")
        if missing is None:
            raise
        _end(13, "UNSUPPORTED", missing.message, missing.hint)
    run()


def _end(code: int, name: str, message: str, hint: str) -> NoReturn:
    """End as every verb does, where no verb could be imported."""
    sys.stderr.write(f"ftckpt: {message}\nhint: {hint}\n")
    if "--json" in sys.argv:
        import json

        result = {"code": code, "name": name, "message": message, "hint": hint}
        sys.stdout.write(json.dumps({"schema": "ftckpt/1", "result": result}) + "\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
