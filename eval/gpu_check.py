"""Run eagle_fsd.evaluation.gpu.command; `--help` says how."""

from eagle_fsd.evaluation.gpu.command import main

if __name__ == "__main__":
    main()
