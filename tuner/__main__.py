"""`python -m tuner` is `tuner`."""

from tuner.app.cli.main import main

if __name__ == "__main__":
    main()
