"""Run eagle_fsd.evaluation.commands.limits; `--help` says how."""

from eagle_fsd.evaluation.commands.limits import main

if __name__ == "__main__":
    main()
