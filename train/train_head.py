"""The script of `eagle-fsd train head`, for a checkout: see --help."""

from eagle_fsd.training.commands.head import main

if __name__ == "__main__":
    main()
