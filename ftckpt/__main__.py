"""`python -m ftckpt`: the command line, also where no script is installed."""

from ftckpt.commands.app import main

if __name__ == "__main__":
    main()
