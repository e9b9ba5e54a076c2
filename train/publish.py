"""The script of `eagle-fsd train publish`, for a checkout: see --help."""

from eagle_fsd.training.commands.publish import main

if __name__ == "__main__":
    main()
