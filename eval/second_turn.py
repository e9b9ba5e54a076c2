"""Run eagle_fsd.evaluation.commands.second_turn; `--help` says how."""

from eagle_fsd.evaluation.commands.second_turn import main

if __name__ == "__main__":
    main()
