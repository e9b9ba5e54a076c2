"""Run eagle_fsd.evaluation.sampled_children.command; `--help` says how."""

from eagle_fsd.evaluation.sampled_children.command import main

if __name__ == "__main__":
    main()
