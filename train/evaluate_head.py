"""The script of `eagle-fsd train evaluate`, for a checkout: see --help."""

from eagle_fsd.training.commands.evaluate import main

if __name__ == "__main__":
    main()
