"""Run eagle_fsd.evaluation.commands.calibrate; `--help` says how."""

from eagle_fsd.evaluation.commands.calibrate import main

if __name__ == "__main__":
    main()
