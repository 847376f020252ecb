"""The command line: the installed script, and `python -m ftckpt` where there is none."""

import signal


def main() -> None:
    """Run it; until it can say that it was interrupted, Ctrl-C ends it without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ftckpt.commands.app import main as run

    run()


if __name__ == "__main__":
    main()
