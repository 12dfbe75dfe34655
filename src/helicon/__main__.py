"""`python -m helicon`, and so `accelerate launch -m helicon ...` and `torchrun -m helicon ...`."""

from helicon.cli import main

if __name__ == "__main__":  # a config may name any module of the package, and importing one must do nothing
    main()
