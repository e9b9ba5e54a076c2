"""Run eagle_fsd.evaluation.second_turn; `--help` says how."""

from eagle_fsd.evaluation.second_turn import main

if __name__ == "__main__":
    main()
