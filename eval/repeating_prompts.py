"""Run eagle_fsd.evaluation.commands.repeating_prompts; `--help` says how."""

from eagle_fsd.evaluation.commands.repeating_prompts import main

if __name__ == "__main__":
    main()
