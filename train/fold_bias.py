"""The script of `eagle-fsd train fold-bias`, for a checkout: see --help."""

from eagle_fsd.training.commands.fold_bias import main

if __name__ == "__main__":
    main()
