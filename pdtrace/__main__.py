"""python -m pdtrace."""

from pdtrace.cli import main

if __name__ == "__main__":
    main()
