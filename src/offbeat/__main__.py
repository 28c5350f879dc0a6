"""``python -m offbeat``: the same as the command ``offbeat``."""

from offbeat.cli.main import main

if __name__ == "__main__":
    main()
