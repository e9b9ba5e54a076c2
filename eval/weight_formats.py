"""Run eagle_fsd.evaluation.weight_formats.command; `--help` says how."""

from eagle_fsd.evaluation.weight_formats.command import main

if __name__ == "__main__":
    main()
