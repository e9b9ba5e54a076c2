"""Run eagle_fsd.evaluation.commands.sweep; `--help` says how."""

from eagle_fsd.evaluation.commands.sweep import main

if __name__ == "__main__":
    main()
