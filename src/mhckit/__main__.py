"""``python -m mhckit``."""

from mhckit.cli import main

if __name__ == "__main__":
    main()
