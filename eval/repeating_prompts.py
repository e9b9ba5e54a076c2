"""Run eagle_fsd.evaluation.repeating_prompts; `--help` says how."""

from eagle_fsd.evaluation.repeating_prompts import main

if __name__ == "__main__":
    main()
