"""`python -m mlxd.scheduler` is `mlxd`."""

from mlxd.scheduler.cli import main

if __name__ == "__main__":
    main()
