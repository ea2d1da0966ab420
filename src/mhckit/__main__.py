"""``python -m mhckit``, and the command ``mhckit``."""

_EXTRA = ("rich", "typer")


def main() -> None:
    """The command line, or one line that says how to get what it needs."""
    try:
        from mhckit.cli import main as run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        raise SystemExit(f'mhckit\'s commands need {package}: pip install "mhckit[cli]"') from None
    run()


if __name__ == "__main__":
    main()
