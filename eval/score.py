"""Run eagle_fsd.evaluation.commands.score; `--help` says how."""

from eagle_fsd.evaluation.commands.score import main

if __name__ == "__main__":
    main()
