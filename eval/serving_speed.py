"""Run eagle_fsd.evaluation.serving.race_command; `--help` says how."""

from eagle_fsd.evaluation.serving.race_command import main

if __name__ == "__main__":
    main()
