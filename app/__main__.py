"""``python -m app`` is ``trainmedic``."""

from app.cli import main

if __name__ == "__main__":
    main(prog_name="trainmedic")
