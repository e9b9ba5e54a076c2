"""The script of `eagle-fsd train rank`, for a checkout: see --help."""

from eagle_fsd.training.commands.rank import main

if __name__ == "__main__":
    main()
