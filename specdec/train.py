"""`python -m specdec.train`, which is `specdec train`."""

from specdec.training.train import main

if __name__ == "__main__":
    main()
