"""Run eagle_fsd.evaluation.commands.tau; `--help` says how."""

from eagle_fsd.evaluation.commands.tau import main

if __name__ == "__main__":
    main()
