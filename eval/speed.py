"""Run eagle_fsd.evaluation.commands.speed; `--help` says how."""

from eagle_fsd.evaluation.commands.speed import main

if __name__ == "__main__":
    main()
