"""Run eagle_fsd.evaluation.commands.exchange; `--help` says how."""

from eagle_fsd.evaluation.commands.exchange import main

if __name__ == "__main__":
    main()
