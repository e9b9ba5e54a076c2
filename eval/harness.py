"""Run eagle_fsd.integrations.lm_eval.command; `--help` says how."""

from eagle_fsd.integrations.lm_eval.command import main

if __name__ == "__main__":
    main()
