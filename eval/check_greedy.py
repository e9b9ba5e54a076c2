"""Run eagle_fsd.evaluation.commands.greedy; `--help` says how."""

from eagle_fsd.evaluation.commands.greedy import main

if __name__ == "__main__":
    main()
