"""The script of `eagle-fsd train text`, for a checkout: see --help."""

from eagle_fsd.training.commands.text import main

if __name__ == "__main__":
    main()
