"""Run eagle_fsd.evaluation.commands.report; `--help` says how."""

from eagle_fsd.evaluation.commands.report import main

if __name__ == "__main__":
    main()
