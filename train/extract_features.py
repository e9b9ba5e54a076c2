"""The script of `eagle-fsd train features`, for a checkout: see --help."""

from eagle_fsd.training.commands.features import main

if __name__ == "__main__":
    main()
