"""The script of `eagle-fsd train synthesize`, for a checkout: see --help."""

from eagle_fsd.training.commands.synthesize import main

if __name__ == "__main__":
    main()
